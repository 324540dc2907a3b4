"""What computes the experts, and of which weights."""

from __future__ import annotations

import dataclasses

import pytest

from moe_optimizer.measure.quality.kernels import kernel_at
from moe_optimizer.passes.registry import resolve_wishes
from tests.builders import cpu_machine, made_plan, tiny_moe


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [((), "bfloat16"), (("--dtype", "float32"), "float32")],
)
def test_vllms_own_kernel_is_named_with_the_dtype_that_it_is_served_in(arguments: tuple[str, ...], dtype: str) -> None:
    wishes = resolve_wishes([], ["flash_dmoe"])
    plan = made_plan(tiny_moe(), cpu_machine(), wishes=wishes, vllm_args=arguments)
    assert kernel_at(plan, (), 8).dtype == dtype


def test_vllms_own_kernel_is_named_with_the_format_of_a_checkpoint() -> None:
    plan = made_plan(tiny_moe(), cpu_machine(), wishes=resolve_wishes([], ["flash_dmoe"]))
    quantised = dataclasses.replace(plan.model, expert_format="mxfp4", quant_method="mxfp4")
    assert kernel_at(plan.replace(model=quantised), (), 8).dtype == "mxfp4"
