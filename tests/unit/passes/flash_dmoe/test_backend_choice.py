"""The fastest of all kernels is taken, ours or another backend of vLLM's, and the plan says which and by how much."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.passes.flash_dmoe.backend_choice import best_backend, never_slower_than, of_backend, with_ours
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.specs.kernel_speeds import MARGIN, KernelSpeeds, TokenSpeeds, token_ranges
from moe_optimizer.specs.workload import WorkloadSpec
from tests.builders import qwen3_30b_a3b_fp8
from tests.unit.passes.flash_dmoe.test_flash_dmoe import decide_on_h200, speeds

ON = {"flash_dmoe": (Wish.ON, "flag --enable-flash-dmoe")}
BATCH = WorkloadSpec(batch_size=64, input_tokens=1, output_tokens=1, max_model_len=None)


def table(
    ours: Sequence[float], peers: Mapping[str, Sequence[float]], *, backend: str = "triton", **changes: Any
) -> KernelSpeeds:
    """A layer at 1, 64 and 8192 tokens, where vLLM's Triton takes 100 each time."""
    rows = tuple(
        TokenSpeeds(
            tokens=tokens,
            stock_us=100.0,
            ours_us={"direct": ours[index]},
            peers_us={name: times[index] for name, times in peers.items() if times[index]},
        )
        for index, tokens in enumerate((1, 64, 8192))
    )
    return speeds(rows, backend=backend, weights="fp8_block", **changes)


def decide(*tables: KernelSpeeds, **changes: Any) -> Decision:
    return decide_on_h200(*tables, **({"model": qwen3_30b_a3b_fp8(), "workload": BATCH} | changes))


def test_another_backend_that_is_the_fastest_is_given_to_vllm() -> None:
    decision = decide(table((90, 90, 90), {"marlin": (90, 60, 90)}))
    assert (decision.status, decision.applier) == (Status.ON, Applier.FLAGS)
    assert [(each.flag, each.value) for each in decision.vllm_args.arguments] == [("--moe-backend", "marlin")]
    assert decision.params_as(FlashDmoeParams).kernel is None
    assert "marlin measured 1.50x faster at 64 tokens" in decision.reason
    assert decision.gain is not None
    assert decision.gain.ratio.value == pytest.approx(100 / 60)


@pytest.mark.parametrize("times", [(90, 89.5, 90), (90, 60, 95), (95, 60, 90), (90, 60, 0)])
def test_one_that_does_not_gain_at_the_batch_size_or_loses_elsewhere_is_not(times: Sequence[float]) -> None:
    decision = decide(table((90, 90, 90), {"marlin": times}))
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert not decision.vllm_args.arguments
    assert "at 64 tokens" in decision.rejected["--moe-backend marlin"]


def test_ours_are_not_switched_on_where_another_backend_beats_them() -> None:
    assert decide(table((90, 90, 90), {"marlin": (50, 50, 50)})).applier is Applier.FLAGS
    asked = decide(table((90, 90, 90), {"marlin": (50, 50, 50)}), wishes=ON)
    assert asked.applier is Applier.PLUGIN
    assert "marlin" in asked.warnings[0]


def test_one_that_vllm_refuses_is_named_with_its_reason() -> None:
    decision = decide(table((90, 90, 90), {}, unavailable={"humming": "not installed"}))
    assert decision.rejected["--moe-backend humming"] == "not available: not installed"


def test_where_vllm_takes_another_backend_by_itself_ours_bring_triton_with_them_if_they_win() -> None:
    decision = decide(table((50, 50, 50), {"flashinfer_cutlass": (60, 60, 60)}, backend="flashinfer_cutlass"))
    assert decision.applier is Applier.PLUGIN
    assert [(each.flag, each.value) for each in decision.vllm_args.arguments] == [("--moe-backend", "triton")]


@pytest.mark.parametrize("times", [(40, 40, 40), (60, 60, 45)])
def test_what_vllm_takes_by_itself_stays_where_it_is_faster_anywhere(times: Sequence[float]) -> None:
    decision = decide(table((50, 50, 50), {"flashinfer_cutlass": times}, backend="flashinfer_cutlass"))
    assert (decision.status, decision.applier) == (Status.OFF, Applier.NONE)
    assert not decision.vllm_args.arguments
    assert "flashinfer_cutlass" in decision.reason


def test_in_a_server_that_runs_already_no_backend_can_be_chosen() -> None:
    slow = decide(table((90, 90, 90), {"marlin": (50, 50, 50)}), inside_vllm=True)
    assert slow.applier is Applier.PLUGIN
    other = decide(table((50, 50, 50), {"deep_gemm": (60, 60, 60)}, backend="deep_gemm"), inside_vllm=True)
    assert other.applier is Applier.NONE


def test_the_users_own_backend_stays() -> None:
    decision = decide(table((90, 90, 90), {"marlin": (50, 50, 50)}), pinned={"--moe-backend": "triton"})
    assert decision.applier is Applier.PLUGIN
    assert not decision.vllm_args.arguments


def test_vllms_cutlass_kernel_is_only_for_the_methods_that_vllm_allows_it_to() -> None:
    model = dataclasses.replace(qwen3_30b_a3b_fp8(), weight_block=None, fp8_scales="channel")
    fast = dataclasses.replace(table((90, 90, 90), {"cutlass": (50, 50, 50)}), weights="fp8_channel")
    quark = decide(fast, model=dataclasses.replace(model, quant_method="quark"))
    assert quark.applier is Applier.PLUGIN
    allowed = decide(fast, model=dataclasses.replace(model, quant_method="compressed-tensors"))
    assert allowed.applier is Applier.FLAGS


_TIMES = st.floats(min_value=1, max_value=1000)
_ROW = st.tuples(_TIMES, _TIMES, _TIMES, _TIMES)


@given(rows=st.lists(_ROW, min_size=1, max_size=6), batch=st.integers(1, 10_000))
def test_a_chosen_backend_is_never_slower_than_ours_and_triton_and_gains_at_the_batch_size(
    rows: list[tuple[float, float, float, float]], batch: int
) -> None:
    measured = tuple(
        TokenSpeeds(tokens=4**power, stock_us=stock, ours_us={"direct": ours}, peers_us={"marlin": a, "deep_gemm": b})
        for power, (stock, ours, a, b) in enumerate(rows)
    )
    ours = with_ours(token_ranges(measured))
    name = best_backend(speeds(measured, backend="triton"), ours, batch, ("marlin", "deep_gemm"))
    if name:
        assert never_slower_than(of_backend(name), ours, measured)
        assert all(row.peers_us[name] * (1 - MARGIN) <= row.stock_us for row in measured)
