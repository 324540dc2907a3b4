"""The op through which vLLM reaches the CPU kernels: a repeated call takes a shorter way to the same result."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_optimizer.errors import TensorContractError  # noqa: E402
from moe_optimizer.ops import cpu_calls  # noqa: E402
from moe_optimizer.ops.fp8_quant import quantize_fp8  # noqa: E402
from moe_optimizer.ops.int4 import quantize_int4  # noqa: E402
from moe_optimizer.ops.mxfp4 import quantize_mxfp4  # noqa: E402
from moe_optimizer.ops.sparse_24 import prune_24  # noqa: E402
from moe_optimizer.vllm_plugin.experts.op import run_experts  # noqa: E402
from moe_optimizer.vllm_plugin.experts.weight_format import (  # noqa: E402
    PLAIN,
    ExpertsCall,
    KernelWeights,
    WeightFormat,
    weight_format,
)
from tests.compiled_kernels import needs_kernels  # noqa: E402
from tests.unit.vllm_plugin.experts.converted_layers import EXPERTS, layer, layer_call  # noqa: E402

pytestmark = needs_kernels


def in_format(name: str) -> KernelWeights:
    w13, w2 = layer()
    if name in {"fp8", "mxfp4"}:
        quantize = quantize_fp8 if name == "fp8" else quantize_mxfp4
        (w13, w13_scale), (w2, w2_scale) = quantize(w13), quantize(w2)
        return KernelWeights(name, w13, w2, w13_scale, w2_scale)
    if name == "int4":
        one, other = quantize_int4(w13, 32), quantize_int4(w2, 32)
        return KernelWeights(name, one.codes, other.codes, one.scale, other.scale)
    if name == "sparse_24":
        one, other = prune_24(w13), prune_24(w2)
        return KernelWeights(name, one.values, other.values, w13_mask=one.mask, w2_mask=other.mask)
    return KernelWeights(name, w13, w2)


def by_op(weights: KernelWeights, call: ExpertsCall) -> Any:
    out = torch.full_like(call.x, float("nan"))
    run_experts(
        out, call.x, weights.w13, weights.w2, call.topk_weights, call.topk_ids, call.expert_map, *weights[3:9],
        call.w13_bias, call.w2_bias, weights.format,
    )  # fmt: skip
    return out


def called(tokens: int) -> ExpertsCall:
    return layer_call(tokens, even=(0, 1), odd=(2, 3))


@pytest.mark.parametrize("name", [PLAIN, "fp8", "mxfp4", "int4", "sparse_24"])
def test_repeated_calls_of_other_tokens_give_the_bits_of_first_ones(name: str) -> None:
    weights = in_format(name)
    for tokens in (4, 4, 2, 18):
        got = by_op(weights, called(tokens))
        cpu_calls.known().clear()
        first = called(tokens)
        weight_format(name).compute(weights, first)
        assert torch.equal(got, first.out)


@pytest.mark.parametrize(
    ("name", "biases", "op"),
    [(PLAIN, False, "run_plain_experts"), (PLAIN, True, "run_experts"), ("fp8", False, "run_experts")],
)
def test_a_layer_without_anything_else_is_called_without_arguments_for_it(name: str, biases: bool, op: str) -> None:
    weights, call = in_format(name), called(4)
    if biases:
        call = call._replace(w13_bias=torch.zeros(weights.w13.shape[:2]), w2_bias=torch.zeros(weights.w2.shape[:2]))
    with torch.profiler.profile() as profile:
        by_op(weights, call)
    (ran,) = {each.key for each in profile.key_averages() if each.key.startswith("moe_optimizer_vllm::")}
    assert ran == f"moe_optimizer_vllm::{op}"


def test_only_the_first_call_of_a_layer_is_described_for_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, described = in_format(PLAIN), list[int]()
    compute = WeightFormat.compute

    def counted(self: WeightFormat, weights: KernelWeights, call: ExpertsCall) -> None:
        described.append(call.x.shape[0])
        compute(self, weights, call)

    monkeypatch.setattr(WeightFormat, "compute", counted)
    cpu_calls.known().clear()
    for tokens in (4, 4, 2, 18):
        by_op(weights, called(tokens))
    assert described == [4]


def test_what_breaks_the_contract_is_refused_after_a_call_that_did_not() -> None:
    weights, right = in_format(PLAIN), called(4)
    for _ in range(2):
        by_op(weights, right)
    for wrong in (
        right._replace(topk_ids=right.topk_ids + EXPERTS),
        right._replace(topk_ids=right.topk_ids[:2]),
        right._replace(topk_weights=right.topk_weights.double()),
        right._replace(x=right.x.double()),
    ):
        with pytest.raises(TensorContractError):
            by_op(weights, wrong)
