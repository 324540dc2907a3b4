"""`flash_dmoe`: one whole MoE layer, from router logits to combined output."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_optimizer.ops import _load, cuda_dispatch
from moe_optimizer.ops.expert_inputs import Inputs
from moe_optimizer.ops.fused_experts import check_inputs, run, why_reference
from moe_optimizer.ops.kernel_arguments import DTYPE_CODE, Router
from moe_optimizer.ops.registration import register_op
from moe_optimizer.ops.tensor_check import TensorChecks
from moe_optimizer.ops.topk_router import LOGITS_DTYPES, check_router, topk_router


class Gate(NamedTuple):
    """How router logits become experts, in the order of the schema; meaning: `topk_router`."""

    score_bias: Tensor | None
    top_k: int
    renormalize: bool
    scoring: str
    num_expert_group: int | None
    topk_group: int | None
    routed_scaling_factor: float

    def router(self, logits: Tensor) -> Router:
        """Return the same for kernels: 1 group where there are none, the bias contiguous."""
        groups = self.num_expert_group or 1
        return Router(
            logits=logits,
            top_k=self.top_k,
            scoring=self.scoring,
            renormalize=self.renormalize,
            num_expert_group=groups,
            topk_group=self.topk_group if groups > 1 and self.topk_group is not None else groups,
            score_bias=None if self.score_bias is None else self.score_bias.contiguous(),
            routed_scaling_factor=self.routed_scaling_factor,
        )


class Experts(NamedTuple):
    """The experts' tensors, in the order of the schema; meaning: `fused_experts`."""

    w13: Tensor
    w2: Tensor
    expert_map: Tensor | None
    w13_scale: Tensor | None
    w2_scale: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    activation: str


class _Inputs(NamedTuple):
    """The inputs of the registered ops."""

    x: Tensor
    router_logits: Tensor
    experts: Experts
    gate: Gate


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
    experts = Experts(w13, w2, expert_map, w13_scale, w2_scale, w13_bias, w2_bias, activation)
    gate = Gate(score_bias, top_k, renormalize, scoring, num_expert_group, topk_group, routed_scaling_factor)
    if out is None:
        return torch.ops.moe_optimizer.flash_dmoe(x, router_logits, *experts, *gate)
    torch.ops.moe_optimizer.flash_dmoe_out(x, router_logits, *experts, *gate, out)
    return out


def _check(inputs: _Inputs, out: Tensor | None) -> None:
    x, router_logits, experts, gate = inputs
    check = TensorChecks("flash_dmoe")
    check.shape("x", x, "T", "H")
    check.dtype("router_logits", router_logits, *LOGITS_DTYPES)
    check_router(router_logits, gate.top_k, gate.scoring, gate.num_expert_group, gate.topk_group)
    if experts.expert_map is None:
        check.shape("w13", experts.w13, "E", "2I", "H")
    else:
        check.shape("expert_map", experts.expert_map, "E")
    check.shape("router_logits", router_logits, "T", "E")
    check.contiguous_rows("router_logits", router_logits)
    check.device("router_logits", router_logits, x.device)
    if gate.score_bias is not None:
        check.shape("score_bias", gate.score_bias, "E")
        check.dtype("score_bias", gate.score_bias, torch.float32)
        check.device("score_bias", gate.score_bias, x.device)
    check_inputs(_after_router(x, experts, *_empty_routing(router_logits, gate)), out, op="flash_dmoe")


def _empty_routing(router_logits: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    shape = (router_logits.shape[0], gate.top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=router_logits.device)
    return weights, torch.empty(shape, dtype=torch.int32, device=router_logits.device)


def _after_router(x: Tensor, experts: Experts, topk_weights: Tensor, topk_ids: Tensor) -> Inputs:
    """Return the inputs of `fused_experts`."""
    return Inputs(x, experts.w13, experts.w2, topk_weights, topk_ids, *experts[2:])


def _run(inputs: _Inputs, out: Tensor) -> None:
    x, router_logits, experts, gate = inputs
    topk_weights, topk_ids = _empty_routing(router_logits, gate)
    reason = why_reference(x, experts.w13, experts.w2, topk_ids)
    if reason is None and x.is_cuda:
        after_router = _after_router(x, experts, topk_weights, topk_ids)
        reason = cuda_dispatch.run_fused_experts(after_router, out, gate.router(router_logits.contiguous()))
        if reason is None:
            return
    if reason is None:
        _route(gate.router(router_logits), topk_weights, topk_ids)
    else:
        topk_weights, topk_ids = topk_router(router_logits, **gate._asdict())
    run(_after_router(x, experts, topk_weights, topk_ids), out)


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


def _parse(arguments: tuple[Any, ...]) -> _Inputs:
    x, router_logits, *rest = arguments
    first_of_gate = len(Experts._fields)
    return _Inputs(x, router_logits, Experts._make(rest[:first_of_gate]), Gate._make(rest[first_of_gate:]))


register_op(
    "flash_dmoe",
    "Tensor x, Tensor router_logits, Tensor w13, Tensor w2, Tensor? expert_map, Tensor? w13_scale, "
    "Tensor? w2_scale, Tensor? w13_bias, Tensor? w2_bias, str activation, Tensor? score_bias, int top_k, "
    "bool renormalize, str scoring, int? num_expert_group, int? topk_group, float routed_scaling_factor",
    parse=_parse,
    check=_check,
    run=_run,
)
