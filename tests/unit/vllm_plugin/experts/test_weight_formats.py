"""What every format of converted experts does: its kernel computes with it, and what cannot be converted stays."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_optimizer.errors import RequiredNotAppliedError  # noqa: E402
from moe_optimizer.vllm_plugin.experts.weight_format import planned_format, weight_format  # noqa: E402
from moe_optimizer.vllm_plugin.session import PluginSession  # noqa: E402
from tests.compiled_kernels import AVAILABLE, REASON  # noqa: E402
from tests.unit.vllm_plugin.experts.converted_layers import NAME, assert_computes_with, layer  # noqa: E402

Activate = Callable[..., PluginSession]
PASSES = {"fp8": "fp8", "mxfp4": "four_bit", "int4": "four_bit", "sparse_24": "sparsity_24"}
"""Format -> the pass that converts to it."""
every_format = pytest.mark.parametrize("name", list(PASSES))
with_a_budget = pytest.mark.parametrize("name", ["fp8", "mxfp4", "int4"])


def planned(activate_pass: Activate, name: str, *, required: bool = False, **settings: Any) -> PluginSession:
    chosen = {"format": name} if PASSES[name] == "four_bit" else {}
    return activate_pass(PASSES[name], required=required, **chosen, **settings)


@every_format
def test_the_plan_decides_the_format_which_counts_for_both_passes(activate_pass: Activate, name: str) -> None:
    assert planned_format(planned(activate_pass, name)).name == name
    assert planned_format(activate_pass(PASSES[name], on=False)).name == "plain"
    assert weight_format(name).passes == ("flash_dmoe", PASSES[name])


@every_format
def test_the_kernel_computes_with_the_converted_weights(activate_pass: Activate, name: str) -> None:
    if name != "fp8" and not AVAILABLE:  # FP8 is computed in plain torch then
        pytest.skip(f"compiled kernels: {REASON}")
    planned(activate_pass, name)
    form = weight_format(name)
    assert_computes_with(form, form.convert(NAME, *layer()))


@with_a_budget
def test_without_a_budget_nothing_is_measured(activate_pass: Activate, name: str) -> None:
    planned(activate_pass, name, max_layer_error=None)
    converted = weight_format(name).convert(NAME, *layer())
    assert (converted.format, converted.output_error) == (name, None)


@pytest.mark.parametrize(("name", "budget"), [("fp8", 0.001), ("mxfp4", 0.05), ("int4", 0.02)])
def test_a_layer_over_the_budget_stays_as_planned_and_says_by_how_much(
    activate_pass: Activate, name: str, budget: float
) -> None:
    session = planned(activate_pass, name, max_layer_error=budget)
    w13, w2 = layer()
    left = weight_format(name).convert(NAME, w13, w2)
    assert (left.format, left.w13 is w13, left.w2 is w2) == ("plain", True, True)
    assert left.output_error is not None
    assert left.output_error > budget
    assert left.why_plain.endswith(f"{left.output_error:.3g}, allowed are {budget:g}")
    assert session.proof.passes[PASSES[name]].why_not == ""


@pytest.mark.parametrize(
    ("name", "settings", "changes", "why"),
    [
        ("mxfp4", {}, {}, ""),
        ("mxfp4", {}, {"intermediate_size_per_partition": 48}, "found 128 and 48"),
        ("int4", {"group": 64}, {"intermediate_size_per_partition": 64}, ""),
        ("int4", {"group": 64}, {"intermediate_size_per_partition": 96}, "found 128 and 96"),
        ("sparse_24", {}, {}, ""),
        ("sparse_24", {}, {"in_dtype": torch.float32}, "found torch.float32"),
        ("sparse_24", {}, {"intermediate_size_per_partition": 24}, "found 128 and 24"),
    ],
)
def test_layers_that_it_does_not_cover_are_refused(
    activate_pass: Activate, name: str, settings: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    planned(activate_pass, name, **settings)
    config = {"in_dtype": torch.bfloat16, "hidden_dim": 128, "intermediate_size_per_partition": 32} | changes
    found = weight_format(name).why_not(SimpleNamespace(**config))
    assert why in found
    assert bool(found) == bool(why)


@every_format
def test_a_layer_that_is_not_finite_stays_and_is_refused(activate_pass: Activate, name: str) -> None:
    session = planned(activate_pass, name)
    for matrix, value in ((0, float("inf")), (1, float("nan"))):
        weights = layer()
        weights[matrix][matrix, 0, 0] = value
        left = weight_format(name).convert(NAME, *weights)
        assert (left.format, left.w13 is weights[0], left.w2 is weights[1]) == ("plain", True, True)
        assert left.why_plain
        assert f"expert {matrix} has" in session.proof.passes[PASSES[name]].why_not


@every_format
def test_where_it_is_required_that_is_an_error(activate_pass: Activate, name: str) -> None:
    planned(activate_pass, name, required=True)
    w13, w2 = layer()
    w13[0, 0, 0] = float("inf")
    with pytest.raises(RequiredNotAppliedError, match=f"{PASSES[name]}: .*not applied"):
        weight_format(name).convert(NAME, w13, w2)
