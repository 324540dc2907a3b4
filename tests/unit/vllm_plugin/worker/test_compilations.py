"""What a worker compiles is counted: before it is ready, and after."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.proof.record import WARMING_FILE, CompilationProof, Proof, ProofWriter, read_proofs
from moe_optimizer.proof.table import compiled_after_ready
from moe_optimizer.vllm_plugin.proof_metrics import proof_metrics
from moe_optimizer.vllm_plugin.session import PluginSession
from moe_optimizer.vllm_plugin.worker import compilations
from moe_optimizer.vllm_plugin.worker.compilations import JIT_EVENTS, CompilationWatch
from tests.builders import OURS, cpu_machine, made_plan, tiny_moe

STEP = SimpleNamespace(total_num_scheduled_tokens=517, num_scheduled_tokens={"a": 512, "b": 5})


@pytest.fixture
def session(tmp_path: Path) -> PluginSession:
    return PluginSession(run_dir=tmp_path, plan=made_plan(tiny_moe(), cpu_machine(), wishes=OURS))


@pytest.fixture
def watch(session: PluginSession, monkeypatch: pytest.MonkeyPatch) -> CompilationWatch:
    made = CompilationWatch(session)
    monkeypatch.setattr(compilations, "_watch", made)
    return made


def counts(session: PluginSession) -> tuple[int, int]:
    proof = session.proof.compilations
    assert proof is not None
    return proof.before_ready, proof.after_ready


def test_what_is_compiled_before_the_first_step_is_before_ready(
    session: PluginSession, watch: CompilationWatch
) -> None:
    watch.compiled("a graph")
    assert counts(session) == (1, 0)


def test_what_a_warm_up_compiles_is_before_ready(
    session: PluginSession, watch: CompilationWatch, tmp_path: Path
) -> None:
    (tmp_path / WARMING_FILE).touch()
    watch.step(STEP)
    watch.compiled("a graph")
    assert counts(session) == (1, 0)


def test_what_is_compiled_later_is_a_warning_with_kernel_and_shape(
    session: PluginSession, watch: CompilationWatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch.step(STEP)
    watch.compiled("Triton kernel fused_moe_kernel")
    assert counts(session) == (0, 1)
    assert re.search("fused_moe_kernel,.* 517 tokens.* 2 ", caplog.text)
    proof = session.proof.compilations
    assert proof is not None
    assert proof.last[0].startswith("Triton kernel fused_moe_kernel")


def test_the_proof_names_only_the_last_ones(session: PluginSession, watch: CompilationWatch) -> None:
    watch.step(STEP)
    for number in range(20):
        watch.compiled(f"kernel {number}")
    proof = session.proof.compilations
    assert proof is not None
    assert proof.after_ready == 20
    assert len(proof.last) == 8
    assert proof.last[-1].startswith("kernel 19")


def test_an_event_of_vllms_monitor_is_counted_and_passed_on(session: PluginSession, watch: CompilationWatch) -> None:
    passed: list[dict[str, Any]] = []
    event = {"backend": "Triton", "event": "kernel JIT compilation", "fn_name": "k", "detail": None}
    JIT_EVENTS.replacement(lambda **event: passed.append(event))(**event)
    assert passed == [event]
    assert counts(session) == (1, 0)


def found_in_its_cache(listener: Any, kernel: str, *, hit: bool) -> None:
    """Tell what Triton 3.6 tells of a kernel right before its hook, which is vLLM's monitor."""
    listener(src=SimpleNamespace(name=kernel), metadata={}, metadata_group={}, times=None, cache_hit=hit)
    name = f"Kernels.{kernel}"
    JIT_EVENTS.replacement(lambda **event: None)(backend="Triton", event="kernel JIT compilation", fn_name=name)


@pytest.fixture
def listener(watch: CompilationWatch, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Triton's, once the worker watches."""
    knobs = SimpleNamespace(compilation=SimpleNamespace(listener=None))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))
    compilations._follow_triton(watch)
    return knobs.compilation.listener


def test_a_kernel_that_triton_finds_in_its_cache_is_not_compiled(session: PluginSession, listener: Any) -> None:
    found_in_its_cache(listener, "one", hit=True)
    found_in_its_cache(listener, "two", hit=False)
    assert counts(session) == (1, 0)
    assert session.proof.compilations == CompilationProof(before_ready=1, loaded=1)


def test_a_kernel_of_another_name_was_not_what_triton_found(session: PluginSession, listener: Any) -> None:
    found_in_its_cache(listener, "one", hit=True)
    JIT_EVENTS.replacement(lambda **event: None)(backend="Triton", event="kernel JIT compilation", fn_name="two")
    JIT_EVENTS.replacement(lambda **event: None)(backend="TileLang", event="JIT compilation", fn_name="one")
    assert session.proof.compilations == CompilationProof(before_ready=2, loaded=1)


def test_after_ready_a_request_waited_for_a_kernel_in_the_cache_too(
    session: PluginSession, watch: CompilationWatch, listener: Any
) -> None:
    watch.step(STEP)
    found_in_its_cache(listener, "one", hit=True)
    assert counts(session) == (0, 1)
    assert session.proof.compilations is not None
    assert "found in the cache" in session.proof.compilations.last[0]


def test_the_launcher_reads_what_a_request_of_a_warm_up_compiled_as_soon_as_it_is_answered(
    session: PluginSession, watch: CompilationWatch, tmp_path: Path
) -> None:
    (tmp_path / WARMING_FILE).touch()
    watch.step(STEP)
    watch.compiled("a graph")
    (proof,) = read_proofs(tmp_path)
    assert proof.compilations == CompilationProof(before_ready=1)


def worker(rank: int, proof: CompilationProof | None) -> Proof:
    return Proof(
        role="worker", rank=rank, pid=rank, plan_digest="", versions={}, world_size=2, model_rank=rank,
        compilations=proof,
    )  # fmt: skip


def test_the_metrics_have_the_counts_of_every_worker(tmp_path: Path) -> None:
    for rank in range(2):
        ProofWriter(tmp_path, worker(rank, CompilationProof(before_ready=3, after_ready=rank))).write()
    metrics = proof_metrics(tmp_path, read_proofs(tmp_path))
    (metric,) = [each for each in metrics if each.name == "moe_optimizer_compilations"]
    values = {(sample.labels["rank"], sample.labels["when"]): sample.value for sample in metric.samples}
    assert values == {
        ("0", "before_ready"): 3, ("0", "after_ready"): 0, ("1", "before_ready"): 3, ("1", "after_ready"): 1,
    }  # fmt: skip


def test_the_table_says_how_much_was_compiled_after_ready() -> None:
    proofs = [worker(0, CompilationProof(after_ready=2)), worker(1, CompilationProof(after_ready=1))]
    assert compiled_after_ready(proofs) == ("compiled after ready: 3",)
    assert compiled_after_ready([worker(0, None)]) == ()
