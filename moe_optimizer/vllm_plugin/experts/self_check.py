"""Compares kernels with plain torch on a few experts of a layer's own weights, before the layer serves.

A kernel that is right on the tested sizes can be wrong on these: another path through its tiles, weights in a layout
that it does not expect, scales of another meaning.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_optimizer.errors import described
from moe_optimizer.vllm_plugin.experts.layer import ExpertsLayer
from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall

NUM_EXPERTS = 4
"""Chosen: experts of a layer that are tried; no other weights are read."""
_GROUP = 128
# Always stated: vLLM loads weights with its own default dtype and device.
_ON_HOST: Any = {"dtype": torch.float32, "device": "cpu"}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of a comparison."""

    error: float
    """Largest error as a share of the allowed one; infinite for an exception or a result that is not finite."""
    reason: str
    """What is wrong; "" when the kernel may be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedKernel:
    """One kernel to be tried."""

    run: Callable[[ExpertsCall], None]
    """Writes `call.out`."""
    tokens: int
    """Tokens in its call."""
    rounds_activations: bool = False
    """It quantises the activations of both products to E4M3."""


def check_layer(layer: ExpertsLayer, kernels: dict[str, CheckedKernel]) -> CheckResult:
    """Run every kernel once and return the worst result.

    The bound is twice the error of torch in the layer's dtype, plus the spacing of that dtype at the largest output
    (16 times that for FP32, where the order of a sum changes as much). Where a kernel rounds the activations, so does
    torch.

    Args:
        layer: its name seeds the choice of experts and inputs, which is the same at every start.
        kernels: name -> kernel.
    """
    device = layer.weights.w13.device
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(layer.name.encode()))
    experts = torch.randperm(layer.num_local_experts, generator=generator, device="cpu")[:NUM_EXPERTS].tolist()
    dense = {expert: layer.format.dense_expert(layer.weights, expert) for expert in experts}
    worst = CheckResult(0.0, "")
    for name, kernel in kernels.items():
        tokens = kernel.tokens
        routed = _route(layer, experts, tokens, generator)
        call = ExpertsCall(
            # Poisoned: a row that the kernel leaves out is not a number.
            out=torch.full((tokens, layer.hidden_size), math.nan, dtype=layer.dtype, device=device),
            x=torch.randn(tokens, layer.hidden_size, generator=generator, **_ON_HOST).to(device, layer.dtype),
            topk_weights=routed.weights.to(device),
            topk_ids=routed.global_ids.to(device, torch.int32),
            expert_map=layer.expert_map,
            w13_bias=layer.w13_bias,
            w2_bias=layer.w2_bias,
        )
        try:
            kernel.run(call)
            result = _compared(layer, call, routed.local_ids.to(device), dense, rounded=kernel.rounds_activations)
        except Exception as error:  # noqa: BLE001 - whatever it is, the layer must be computed by something else
            result = CheckResult(math.inf, described(error))
        if result.reason:
            return CheckResult(result.error, f"{name}: {result.reason}")
        if result.error > worst.error:
            worst = result
    return worst


@dataclass(frozen=True, slots=True)
class _Routing:
    local_ids: torch.Tensor
    """int64 [T, k]; -1 where the expert is on another rank."""
    global_ids: torch.Tensor
    weights: torch.Tensor


def _route(layer: ExpertsLayer, experts: list[int], tokens: int, generator: torch.Generator) -> _Routing:
    choice = torch.randint(len(experts), (tokens, layer.top_k), generator=generator, device="cpu")
    local_ids = torch.tensor(experts, device="cpu")[choice]
    weights = torch.rand(tokens, layer.top_k, generator=generator, **_ON_HOST)
    if layer.expert_map is None:
        return _Routing(local_ids, local_ids, weights)
    mapping = layer.expert_map.cpu().long()
    to_global = torch.full((layer.num_local_experts,), -1, dtype=torch.int64, device="cpu")
    here = (mapping >= 0).nonzero()[:, 0]
    to_global[mapping[here]] = here
    global_ids = to_global[local_ids]
    elsewhere = (mapping < 0).nonzero()[:, 0]
    if elsewhere.numel():
        # A kernel that ignores the map computes this slot too.
        global_ids[0, 0], local_ids[0, 0] = elsewhere[0], -1
    return _Routing(local_ids, global_ids, weights)


def _compared(
    layer: ExpertsLayer,
    call: ExpertsCall,
    local_ids: torch.Tensor,
    dense: dict[int, tuple[torch.Tensor, torch.Tensor]],
    *,
    rounded: bool,
) -> CheckResult:
    exact = torch.float64 if layer.dtype == torch.float32 else torch.float32
    want = _in_torch(layer, call, local_ids, dense, exact).double()
    in_dtype = _in_torch(layer, call, local_ids, dense, layer.dtype, rounded=rounded).double()
    # Where the exact result is not a number or too large for the dtype, it says nothing about the kernel.
    finite = want.abs() <= torch.finfo(layer.dtype).max / 2
    if not bool(finite.any()):
        return CheckResult(0.0, "")
    scale = want[finite].abs().max().item()
    spacing = torch.finfo(layer.dtype).eps * (16 if layer.dtype == torch.float32 else 1)
    torch_error = (in_dtype - want)[finite].abs().max().item()
    allowed = spacing * scale + (2 * torch_error if math.isfinite(torch_error) else 0.0)
    error = (call.out.double() - want)[finite].abs().max().item()
    if error <= allowed:  # not for NaN
        return CheckResult(error / allowed if allowed else 0.0, "")
    # NaN goes into the proof as infinite.
    share = error / allowed if allowed and math.isfinite(error) else math.inf
    return CheckResult(share, f"error {error:.3g} on {call.x.shape[0]} tokens, allowed {allowed:.3g}")


def _in_torch(
    layer: ExpertsLayer,
    call: ExpertsCall,
    local_ids: torch.Tensor,
    dense: dict[int, tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
    *,
    rounded: bool = False,
) -> torch.Tensor:
    """Compute the call one expert at a time, every step in `dtype`. Shares no code with the ops on purpose."""
    out = torch.zeros(call.x.shape, dtype=dtype, device=call.x.device)
    x = _rounded_to_fp8(call.x) if rounded else call.x
    for expert, (w13, w2) in dense.items():
        tokens, slots = torch.nonzero(local_ids == expert, as_tuple=True)
        gate_up = x[tokens].to(dtype) @ w13.to(dtype).T
        if layer.w13_bias is not None:
            gate_up = gate_up + layer.w13_bias[expert].to(dtype)
        gate, up = gate_up.chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * up
        down = (_rounded_to_fp8(hidden) if rounded else hidden) @ w2.to(dtype).T
        if layer.w2_bias is not None:
            down = down + layer.w2_bias[expert].to(dtype)
        out.index_add_(0, tokens, down * call.topk_weights[tokens, slots, None].to(dtype))
    return out


def _rounded_to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Return the values [n, columns] rounded to E4M3, with one scale per row and `_GROUP` columns."""
    columns = values.shape[1]
    padded = torch.nn.functional.pad(values.float(), (0, -columns % _GROUP)).view(values.shape[0], -1, _GROUP)
    scale = padded.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    rounded = (padded / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.view(values.shape[0], -1)[:, :columns].to(values.dtype)
