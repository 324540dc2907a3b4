"""What a measurement writes, and in which order; the kernels are stand-ins whose times are known."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.inspection.kernel_speeds import read_tables
from moe_optimizer.measure.kernel_speeds import measurement
from moe_optimizer.measure.kernel_speeds.measurement import SpeedRequest
from moe_optimizer.measure.kernel_speeds.peers import Compared
from moe_optimizer.measure.kernel_speeds.timing import Timed
from moe_optimizer.specs.kernel_speeds import STOCK, KernelSpeeds, LayerShape, SpeedQuestion

FP8 = SpeedQuestion(
    device="NVIDIA H100",
    weights="fp8_block",
    shape=LayerShape(hidden_size=64, intermediate_size=32, num_experts=8, num_global_experts=8, top_k=2),
    kernel_hash="abc",
    vllm="0.26.0",
    driver="580",
    torch="2.11.0",
    triton="3.6.0",
    environment="tuned=abc",
)
BF16 = dataclasses.replace(FP8, weights="bf16", environment="")


class StandInPeers:
    """One other backend of vLLM's, which takes half the time."""

    def __init__(self, layers: Any, compared: Compared, write: Any) -> None:
        self._compared = compared
        compared.unavailable = {"humming": "not installed"}

    def compare(self, rows: Any, is_left: Any, deadline: float) -> None:
        for tokens, row in rows.items():
            if not is_left():
                return
            rows[tokens] = dataclasses.replace(row, peers_us={"deep_gemm": 25.0})
        self._compared.backend = "triton"


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a measurement on a clock that each number of tokens moves by a second; returns tables and steps."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(measurement, "_prepare", lambda request: None)
    monkeypatch.setattr(measurement, "_layers", lambda question, device: [question.weights])
    monkeypatch.setattr(measurement, "busy_before", lambda device, cores: "")

    def timed(layers: Any, tokens: int, rows: Any, deadline: float) -> Timed:
        clock[0] += 1.0
        return Timed({STOCK: 100.0, "direct": 50.0}, {STOCK: 100.0, "direct": 50.0}, spread=0.0)

    monkeypatch.setattr(measurement, "_timed", timed)
    monkeypatch.setattr(measurement, "Peers", StandInPeers)

    def run(*questions: SpeedQuestion, seconds: float, **fields: Any) -> tuple[tuple[KernelSpeeds, ...], list[str]]:
        steps: list[str] = []
        path = tmp_path / "tables.json"
        request = SpeedRequest(device="cuda", questions=questions, seconds=seconds, tables=str(path), **fields)
        measurement._measure(request, lambda _share, text: steps.append(text))
        return read_tables(path), steps

    return run


def tokens(table: KernelSpeeds) -> list[int]:
    return [row.tokens for row in table.rows]


def test_the_likely_format_is_measured_first_and_from_both_ends(measure: Any) -> None:
    (table,), steps = measure(FP8, BF16, seconds=3.0)
    assert steps == ["1 tokens, fp8_block", "8192 tokens, fp8_block", "64 tokens, fp8_block"]
    assert (table.weights, tokens(table), table.unfinished) == ("fp8_block", [1, 64, 8192], True)


def test_with_enough_time_every_format_has_a_finished_table(measure: Any) -> None:
    tables, _ = measure(FP8, BF16, seconds=100.0)
    assert [(table.weights, table.unfinished) for table in tables] == [("fp8_block", False), ("bf16", False)]
    for table, question in zip(tables, (FP8, BF16), strict=True):
        assert question.why_not(table) == ""


def test_it_goes_on_with_what_was_begun(measure: Any) -> None:
    (begun,), _ = measure(FP8, seconds=3.0)
    (table,), steps = measure(FP8, seconds=1.0, started=(begun,))
    assert steps == ["512 tokens, fp8_block"]
    assert tokens(table) == [1, 64, 512, 8192]


def test_a_table_of_another_question_is_not_gone_on_with(measure: Any) -> None:
    (begun,), _ = measure(BF16, seconds=3.0)
    _, steps = measure(FP8, seconds=1.0, started=(begun,))
    assert steps == ["1 tokens, fp8_block"]


def test_one_number_of_tokens_is_measured_however_little_time_there_is(measure: Any) -> None:
    (begun,), _ = measure(FP8, seconds=0.0)
    assert tokens(begun) == [1]
    (table,), _ = measure(FP8, seconds=0.0, started=(begun,))
    assert tokens(table) == [1, 8192]


def test_a_busy_device_is_in_the_table_and_stays_there_when_it_is_gone_on_with(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "busy_before", lambda device, cores: "the GPU was busy")
    (begun,), _ = measure(FP8, seconds=1.0)
    assert begun.disturbed == "the GPU was busy"
    for now in ("", "the GPU was busier"):
        monkeypatch.setattr(measurement, "busy_before", lambda device, cores, now=now: now)
        (table,), _ = measure(FP8, seconds=100.0, started=(begun,))
        assert table.disturbed == "the GPU was busy"
    monkeypatch.setattr(measurement, "busy_before", lambda device, cores: "")
    (anew,), _ = measure(FP8, seconds=100.0)
    assert anew.disturbed == ""


def test_vllms_other_backends_are_compared_once_ours_are_measured(measure: Any) -> None:
    (begun,), _ = measure(FP8, seconds=3.0)
    assert (begun.backend, begun.is_final) == ("", False)
    (table,), _ = measure(FP8, seconds=100.0, started=(begun,))
    assert {row.peers_us["deep_gemm"] for row in table.rows} == {25.0}
    assert (table.backend, dict(table.unavailable)) == ("triton", {"humming": "not installed"})
    assert table.is_final


def test_a_table_without_them_is_gone_on_with_until_they_are_compared(measure: Any) -> None:
    (before,), _ = measure(FP8, seconds=100.0)
    before = dataclasses.replace(
        before, backend="", rows=tuple(dataclasses.replace(row, peers_us={}) for row in before.rows)
    )
    assert not before.is_final
    (table,), steps = measure(FP8, seconds=100.0, started=(before,))
    assert steps == ["other backends of vLLM, fp8_block"]
    assert table.is_final


def test_a_vllm_that_tells_nothing_of_its_backends_leaves_ours_measured(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_arguments: Any) -> None:
        raise AttributeError("no such oracle")

    monkeypatch.setattr(measurement, "Peers", unknown)
    (table,), _ = measure(FP8, seconds=100.0)
    assert table.is_final
    assert "no such oracle" in table.unavailable["other"]
