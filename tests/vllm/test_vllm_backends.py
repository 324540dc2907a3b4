"""vLLM's other MoE backends in a measurement: what its oracles answer, and a kernel of its CPU build timed for real."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moe_optimizer.inspection.kernel_speeds import read_tables
from moe_optimizer.measure.kernel_speeds.measurement import SpeedRequest
from moe_optimizer.measure.process import run_measurement
from moe_optimizer.specs.kernel_speeds import LayerShape, SpeedQuestion, TokenSpeeds

if TYPE_CHECKING:  # imported by the tests: every test worker collects this file, and one imports vLLM for it
    from moe_optimizer.measure.kernel_speeds.measured_layer import MeasuredLayer
    from moe_optimizer.measure.kernel_speeds.vllm_backends import Backends
SHAPE = LayerShape(hidden_size=64, intermediate_size=64, num_experts=4, num_global_experts=4, top_k=2)
QUESTION = SpeedQuestion(device="this", weights="bf16", shape=SHAPE, kernel_hash="", vllm="")


@pytest.fixture
def layer() -> MeasuredLayer:
    from moe_optimizer.measure.kernel_speeds.measured_layer import MeasuredLayer

    return MeasuredLayer(QUESTION, device="cpu", seed=0)


def rows() -> dict[int, TokenSpeeds]:
    return {tokens: TokenSpeeds(tokens=tokens, stock_us=100.0, ours_us={"fused_experts": 90.0}) for tokens in (1, 8)}


def portable(*_: Any) -> Backends:
    """The CPU build's portable class as another backend: the one kernel of vLLM's that every processor has."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    from moe_optimizer.measure.kernel_speeds.vllm_backends import Backends

    return Backends("cpu", {"portable": (UnquantizedMoeBackend.CPU, CPUUnquantizedExperts)}, {"triton": "no GPU"})


def test_vllms_kernel_for_bf16_is_timed_in_a_process_that_has_computed_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    request = SpeedRequest(device="cpu", questions=(QUESTION,), seconds=1.0, cores=(0,), tables=str(path))
    # A process of its own: with AMX a kernel that runs before others have asked the system for it ends the process.
    run_measurement(
        "moe_optimizer.measure.kernel_speeds.measurement", request, on_step=lambda *_: None, log=tmp_path / "log"
    )
    (table,) = read_tables(path)
    assert all(row.stock_us > 0 and row.ours_us for row in table.rows)


def test_each_backend_for_such_weights_that_vllm_refuses_is_there_with_its_reason(layer: MeasuredLayer) -> None:
    from moe_optimizer.measure.kernel_speeds.vllm_backends import backends_for

    found = backends_for(layer)
    assert found.taken == "cpu"
    assert "device cpu" in found.unavailable["triton"]
    assert "marlin" not in found.unavailable  # for quantised weights


def test_a_kernel_of_vllms_is_timed_at_every_number_of_tokens(
    layer: MeasuredLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_optimizer.measure.kernel_speeds import vllm_backends
    from moe_optimizer.measure.kernel_speeds.peers import Compared, Peers

    monkeypatch.setattr(vllm_backends, "backends_for", portable)
    compared, measured = Compared(), rows()
    peers = Peers([layer], compared, lambda: None)
    # However slow a busy machine makes it, it stays in the race.
    monkeypatch.setattr("moe_optimizer.measure.kernel_speeds.peers.peers_in_the_race", lambda names, *_: tuple(names))
    peers.compare(measured, lambda: True, float("inf"))
    assert all(row.peers_us["portable"] > 0 for row in measured.values())
    assert (compared.backend, compared.unavailable) == ("cpu", {"triton": "no GPU"})


def test_one_that_fails_has_its_reason_and_one_that_ended_the_process_is_not_tried_again(
    layer: MeasuredLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_optimizer.measure.kernel_speeds import vllm_backends
    from moe_optimizer.measure.kernel_speeds.peers import Compared, Peers

    monkeypatch.setattr(vllm_backends, "backends_for", portable)
    compared, during = Compared(), list[dict[str, str]]()

    def fails(*_: Any) -> None:
        raise RuntimeError("no such kernel image")

    monkeypatch.setattr(vllm_backends, "experts_of", fails)
    Peers([layer], compared, lambda: during.append(dict(compared.unavailable)))
    assert "no such kernel image" in compared.unavailable["portable"]
    # What a process that ends in that call leaves behind:
    left = Compared(unavailable=during[0])
    assert "ended" in left.unavailable["portable"]
    tried: list[Any] = []
    monkeypatch.setattr(vllm_backends, "experts_of", lambda *arguments: tried.append(arguments))
    Peers([layer], left, lambda: None)
    assert not tried
    assert "ended" in left.unavailable["portable"]


def test_one_that_fails_at_more_tokens_is_in_no_row(layer: MeasuredLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_optimizer.measure.kernel_speeds import peers, timing, vllm_backends

    monkeypatch.setattr(vllm_backends, "backends_for", portable)
    monkeypatch.setattr(peers, "peers_in_the_race", lambda names, *_: tuple(names))
    during = list[dict[str, str]]()

    def fails_at_eight(calls: timing.Calls, device: str) -> timing.Sampler:
        found = [each() for each in next(iter(calls.values()))]
        assert found[0].shape[0] < 8, "more tokens than there is room for"
        return timing.sampler_of(calls, device)

    monkeypatch.setattr(peers, "sampler_of", fails_at_eight)
    compared, measured = peers.Compared(), rows()
    peers.Peers([layer], compared, lambda: during.append(dict(compared.unavailable))).compare(
        measured, lambda: True, float("inf")
    )
    assert "more tokens than there is room for" in compared.unavailable["portable"]
    assert [dict(row.peers_us) for row in measured.values()] == [{}, {}]
    assert compared.backend == "cpu"
    # A process that ends instead leaves this:
    assert any(peers.has_ended(each.get("portable", "")) and "8 tokens" in each["portable"] for each in during)


def test_one_that_is_left_out_after_its_first_sample_has_that_time(
    layer: MeasuredLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_optimizer.measure.kernel_speeds import peers, timing, vllm_backends

    monkeypatch.setattr(vllm_backends, "backends_for", portable)
    monkeypatch.setattr(timing, "without_losers", lambda times: tuple(name for name in times if name != "portable"))
    measured = rows()
    peers.Peers([layer], peers.Compared(), lambda: None).compare(measured, lambda: True, float("inf"))
    assert measured[1].peers_us["portable"] > 0
