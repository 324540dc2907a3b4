"""`gate_topk`: the gate product and the top-k of few tokens, in one launch on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.ops import _load, cuda_dispatch, reference
from moe_optimizer.ops.kernel_arguments import GateTopk, Router
from moe_optimizer.ops.registration import register_writing_op
from moe_optimizer.ops.tensor_check import TensorChecks
from moe_optimizer.ops.topk_router import check_router, topk_router

MAX_TOKENS = 8
"""Of the CUDA kernel (`kGateTokens` in csrc/include/moeopt/gate_topk.cuh)."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def gate_topk(
    x: Tensor,
    gate: Tensor,
    *,
    top_k: int,
    renormalize: bool = True,
    scoring: str = "softmax",
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    score_bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    is_padding: Tensor | None = None,
    logits: Tensor | None = None,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return weights (float32) and ids (int32) [T, k] of the experts that the gate chooses, best first.

    Meaning: `topk_router` of `reference.gate_logits(x, gate)`.

    T tokens, H hidden, E experts of the whole layer.

    Args:
        x: [T, H], last dimension contiguous.
        gate: [E, H], dtype of x, last dimension contiguous.
        top_k: as in `topk_router`, like renormalize, scoring, the groups and the factor.
        score_bias: float32 [E].
        is_padding: bool [T]: tokens that go to no expert. Their ids are -1, their weights 0.
        logits: dtype of x, contiguous [T, E]: receives the logits.
        topk_weights: float32, contiguous [T, k]: receives the weights.
        topk_ids: int32, contiguous [T, k]: receives the ids.

    Raises:
        TensorContractError: an argument differs from the above.

    Numerics: float32 sums in a fixed order, rounded once; so logits are those of torch but for the last bit of a few.
    The lower id wins a tie. Limits of the CUDA kernel (`why_no_kernel`): bfloat16, 1 to 8 tokens, H % 8 == 0, 1024
    experts, top-32; beyond them plain torch. Graph-capturable.
    """
    shape = (x.shape[0], top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=x.device) if topk_weights is None else topk_weights
    ids = torch.empty(shape, dtype=torch.int32, device=x.device) if topk_ids is None else topk_ids
    if logits is None:
        logits = torch.empty((x.shape[0], gate.shape[0]), dtype=x.dtype, device=x.device)
    router = (top_k, score_bias, renormalize, scoring, num_expert_group, topk_group, routed_scaling_factor)
    torch.ops.moe_optimizer.gate_topk_out(x, gate, *router, is_padding, logits, weights, ids)
    return weights, ids


def why_no_kernel(call: GateTopk) -> str | None:
    """Return why the CUDA kernel does not cover the call, or None where it does. Reads no device data."""
    if not call.x.is_cuda:
        return f"the kernel of gate_topk runs on a GPU, x is on {call.x.device}"
    reason = cuda_dispatch.why_unavailable(call.x.device)
    if reason is not None:
        return reason
    if call.x.dtype != torch.bfloat16:
        return f"the kernel of gate_topk takes bfloat16, got {call.x.dtype}"
    try:
        _load.kernels().cuda_gate_layout(*call.call())
    except ValueError as error:
        return str(error)
    return None


def run_kernel(call: GateTopk) -> None:
    """Enqueue the CUDA kernel on the current stream. Nothing is allocated, read back or waited for.

    Raises:
        UnsupportedError: the kernel does not cover the call.
        RuntimeError: CUDA refused the launch.
    """
    device = call.x.device
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        arrived = cuda_dispatch.zeroed_words(device, stream)
        try:
            _load.kernels().cuda_gate_run(*call.call(arrived.data_ptr()), stream)
        except ValueError as error:
            raise UnsupportedError(str(error)) from None


def _parse(*arguments: Any) -> GateTopk:
    x, gate, *rule, is_padding, logits, topk_weights, topk_ids = arguments
    return GateTopk(x, gate, Router(logits, *rule), topk_weights, topk_ids, is_padding)


def _check(call: GateTopk) -> None:
    check, router = TensorChecks("gate_topk"), call.router
    check.tokens("x", call.x, *_DTYPES)
    check.shape("gate", call.gate, "E", "H")
    check.dtype("gate", call.gate, call.x.dtype)
    check.contiguous_rows("gate", call.gate)
    if router.score_bias is not None:
        check.shape("score_bias", router.score_bias, "E")
        check.dtype("score_bias", router.score_bias, torch.float32)
    for name, tensor in (("topk_weights", call.topk_weights), ("topk_ids", call.topk_ids)):
        check.shape(name, tensor, "T", router.top_k)
    check.dtype("topk_weights", call.topk_weights, torch.float32)
    check.dtype("topk_ids", call.topk_ids, torch.int32)
    check.shape("logits", router.logits, "T", "E")
    check.dtype("logits", router.logits, call.x.dtype)
    check_router(router.logits, router.top_k, router.scoring, router.num_expert_group, router.topk_group)
    if call.is_padding is not None:
        check.shape("is_padding", call.is_padding, "T")
        check.dtype("is_padding", call.is_padding, torch.bool)
    written = {"logits": router.logits, "topk_weights": call.topk_weights, "topk_ids": call.topk_ids}
    for name, tensor in written.items():
        if not tensor.is_contiguous():
            raise check.error(name, "strides", list(tensor.stride()), "those of a contiguous tensor")
    others = {"gate": call.gate, "score_bias": router.score_bias, "is_padding": call.is_padding}
    check.devices(others | written, call.x.device)


def _run(call: GateTopk) -> None:
    router = call.router
    if call.x.shape[0] == 0:
        return
    if router.score_bias is not None:
        call = call._replace(router=router._replace(score_bias=router.score_bias.contiguous()))
    if call.is_padding is not None:
        call = call._replace(is_padding=call.is_padding.contiguous())
    reason = why_no_kernel(call)
    if reason is None:
        run_kernel(call)
        return
    if call.x.is_cuda:
        _load.warn_of_reference("gate_topk", reason)
    options = router._asdict()
    weights, ids = topk_router(options.pop("logits").copy_(reference.gate_logits(call.x, call.gate)), **options)
    if call.is_padding is not None:
        weights, ids = (each.masked_fill(call.is_padding[:, None], value) for each, value in ((weights, 0), (ids, -1)))
    call.topk_weights.copy_(weights)
    call.topk_ids.copy_(ids)


register_writing_op(
    "gate_topk_out",
    "Tensor x, Tensor gate, int top_k, Tensor? score_bias, bool renormalize, str scoring, int? num_expert_group, "
    "int? topk_group, float routed_scaling_factor, Tensor? is_padding, Tensor(a!) logits, "
    "Tensor(b!) topk_weights, Tensor(c!) topk_ids",
    parse=_parse,
    check=_check,
    run=_run,
)
