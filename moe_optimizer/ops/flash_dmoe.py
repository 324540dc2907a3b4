"""`flash_dmoe`: one whole MoE layer, from router logits to combined output."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_optimizer.ops import _load, cpu_calls, cuda_dispatch
from moe_optimizer.ops.expert_inputs import Inputs
from moe_optimizer.ops.fused_experts import check_inputs, run, why_reference
from moe_optimizer.ops.kernel_arguments import DTYPE_CODE, Router
from moe_optimizer.ops.registration import register_op
from moe_optimizer.ops.tensor_check import TensorChecks
from moe_optimizer.ops.topk_router import LOGITS_DTYPES, check_router, topk_router


class _Inputs(NamedTuple):
    """The inputs of the registered ops."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    expert_map: Tensor | None
    others: tuple[Any, ...]
    """Scales, biases and activation of the experts."""
    router: Router

    def experts(self) -> Inputs:
        """Return the inputs of `fused_experts`, with room for the ids and weights that the router chooses."""
        logits = self.router.logits
        shape = (logits.shape[0], self.router.top_k)
        topk_weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
        topk_ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
        return Inputs(self.x, self.w13, self.w2, topk_weights, topk_ids, self.expert_map, *self.others)


def flash_dmoe(
    x: Tensor,
    router_logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    top_k: int,
    renormalize: bool = True,
    scoring: str = "softmax",
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    score_bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    expert_map: Tensor | None = None,
    activation: str = "silu",
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return `fused_experts` of the experts that `topk_router` picks from the logits.

    Meaning: `weights, ids = topk_router(router_logits, ...)`, then `reference.fused_experts(x, w13, w2, weights,
    ids, ...)`. Shared experts are not part of it.

    Args:
        x: [T, H] as in `fused_experts`.
        router_logits: float32, bfloat16 or float16 [T, E], last dimension contiguous; with expert_map E is the
            number of global experts.
        w13: as in `fused_experts`, like every argument not named here.
        w2: likewise.
        top_k: as in `topk_router`, like renormalize, scoring and the groups.
        score_bias: float32 [E].

    Returns:
        `out`, or a new tensor: [T, H], dtype of x.

    Raises:
        TensorContractError: an argument differs from the above.

    Numerics and limits: those of `fused_experts`; the gate computes in float32, and the lower id wins a tie.
    """
    optional = (expert_map, w13_scale, w2_scale, w13_bias, w2_bias)
    is_plain = num_expert_group is None and topk_group is None and score_bias is None and routed_scaling_factor == 1
    if is_plain and scoring == "softmax" and x.is_cpu and not torch.compiler.is_compiling():
        # Most of what a repeated call of a small layer costs is torch's way into an op in Python.
        result = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        inputs = Inputs(x, w13, w2, router_logits, router_logits, *optional, activation)
        if cpu_calls.again_from_logits(inputs, result, router_logits, top_k, renormalize=renormalize):
            return result
    experts = (w13, w2, *optional, activation)
    router = (top_k, score_bias, renormalize, scoring, num_expert_group, topk_group, routed_scaling_factor)
    if out is None:
        return torch.ops.moe_optimizer.flash_dmoe(x, router_logits, *experts, *router)
    torch.ops.moe_optimizer.flash_dmoe_out(x, router_logits, *experts, *router, out)
    return out


def _parse(arguments: tuple[Any, ...]) -> _Inputs:
    x, logits, w13, w2, expert_map, *rest = arguments
    return _Inputs(x, w13, w2, expert_map, tuple(rest[:5]), Router(logits, *rest[5:]))


def _check(inputs: _Inputs, out: Tensor | None) -> None:
    x, router, logits = inputs.x, inputs.router, inputs.router.logits
    check = TensorChecks("flash_dmoe")
    check.shape("x", x, "T", "H")
    check.dtype("router_logits", logits, *LOGITS_DTYPES)
    check_router(logits, router.top_k, router.scoring, router.num_expert_group, router.topk_group)
    if inputs.expert_map is None:
        check.shape("w13", inputs.w13, "E", "2I", "H")
    else:
        check.shape("expert_map", inputs.expert_map, "E")
    check.shape("router_logits", logits, "T", "E")
    check.contiguous_rows("router_logits", logits)
    if router.score_bias is not None:
        check.shape("score_bias", router.score_bias, "E")
        check.dtype("score_bias", router.score_bias, torch.float32)
    check.devices({"router_logits": logits, "score_bias": router.score_bias}, x.device)
    check_inputs(inputs.experts(), out, op="flash_dmoe")


def _run(inputs: _Inputs, out: Tensor) -> None:
    experts, given = inputs.experts(), inputs.router
    reason = why_reference(experts.x, experts.w13, experts.w2, experts.topk_ids)
    bias = None if given.score_bias is None else given.score_bias.contiguous()
    router = given._replace(score_bias=bias)
    if reason is None and experts.x.is_cuda:
        reason = cuda_dispatch.run_fused_experts(experts, out, router._replace(logits=given.logits.contiguous()))
        if reason is None:
            return
    if reason is None:
        _route(router, experts.topk_weights, experts.topk_ids)
        if cpu_calls.again(experts, out):
            return
    else:
        options = given._asdict()
        topk_weights, topk_ids = topk_router(options.pop("logits"), **options)
        experts = experts._replace(topk_weights=topk_weights, topk_ids=topk_ids)
    run(experts, out)


def _route(router: Router, topk_weights: Tensor, topk_ids: Tensor) -> None:
    call = {
        "num_tokens": router.logits.shape[0],
        "num_experts": router.logits.shape[1],
        "top_k": router.top_k,
        "logits_stride": router.logits.stride(0),
        "logits_dtype": DTYPE_CODE[router.logits.dtype],
        "topk_weights": topk_weights.data_ptr(),
        "topk_ids": topk_ids.data_ptr(),
    }
    _load.kernels().topk_router(router.fields(), call)


register_op(
    "flash_dmoe",
    "Tensor x, Tensor router_logits, Tensor w13, Tensor w2, Tensor? expert_map, Tensor? w13_scale, "
    "Tensor? w2_scale, Tensor? w13_bias, Tensor? w2_bias, str activation, int top_k, Tensor? score_bias, "
    "bool renormalize, str scoring, int? num_expert_group, int? topk_group, float routed_scaling_factor",
    parse=_parse,
    check=_check,
    run=_run,
)
