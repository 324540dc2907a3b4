"""Compares kernels with plain torch on a few experts of a layer's own weights.

A kernel that is right on the tested sizes can be wrong on these: another path through its tiles, weights in a layout
that it does not expect, scales of another meaning. The check runs before a layer serves, and again through vLLM's own
layers (`canary`) whenever their weights may have changed.

Two bounds, both relative and both from what torch itself loses in the layer's dtype (and with the activations in E4M3,
where the kernel rounds them):

- No value is off by more than twice the error of torch plus one spacing of the dtype at the largest output (16 spacings
  in FP32, where the order of a sum changes as much). This sees a wrong expert, a row left out, values that are not
  numbers, inputs of another call.
- No expert's share of the output is scaled by a wrong factor. Rounding errors have no common direction, so the factor
  that fits an expert's outputs best is known much better than one value is: to 6 standard errors of torch's rounding,
  twice torch's own bias, and half a percent for the rounding of one routing weight in BF16 (at most 0.4 %). A scale
  that is wrong by 2 % disappears in the rounding of single values in FP8, but not here.
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
"""Chosen: experts of a layer that are tried before it serves; no other weights are read."""
_COMPARED_ROWS = 64
"""Chosen: rows of one call that are compared at least, the first and the last among them; a kernel computes all."""
_COMPARED_VALUES = 32_768
"""Chosen: values of one call that are compared where it has so many. In 64 rows of a hidden size of 128 the rounding of
FP8 hides one expert's scale that is 2 % off in one layer of four."""
_DRAWN_ROWS = 128
"""Chosen: rows of a call that are drawn, on the host; for 8192 that takes 0.1 s, and every layer is tried."""
_GROUP = 128
_CLAMP, _SLOPE = 7.0, 1.702
"""Of gpt-oss's activation, in its published code."""
_FACTOR_BASE = 0.005
_STANDARD_ERRORS = 6
_WELL_CONDITIONED = 0.02
"""Chosen: smallest eigenvalue of the experts' normalised products from which their factors can be told apart."""
# Always stated: vLLM loads weights with its own default dtype and device.
_ON_HOST: Any = {"dtype": torch.float32, "device": "cpu"}


class NotCheckedError(Exception):
    """A kernel could not be tried, which says nothing about its result: no memory, or another vLLM than known."""


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
    tokens: tuple[int, ...]
    """Tokens in each of its calls."""
    rounds_activations: bool = False
    """It quantises the activations of both products to E4M3."""
    capture: Callable[[ExpertsCall], Callable[[], None]] | None = None
    """Captures `run` of a call in a graph and returns its replay; None where there are no graphs."""
    captured_up_to: int = 0
    """Tokens of the largest graph."""


def check_layer(
    layer: ExpertsLayer, kernels: dict[str, CheckedKernel], *, num_experts: int = NUM_EXPERTS
) -> CheckResult:
    """Run every kernel at each of its sizes and return the worst result; the bounds are the module's.

    A kernel that can be captured is replayed too, on other inputs than those of the capture: a graph that has frozen
    what it should read gives the result of the old ones.

    Args:
        layer: its name seeds the choice of experts and inputs, which is the same at every start.
        kernels: name -> kernel.
        num_experts: how many of its experts are tried.

    Raises:
        NotCheckedError: a kernel says that it could not be tried, or there is no memory for the comparison.
    """
    try:
        return _check_layer(layer, kernels, num_experts)
    except torch.OutOfMemoryError as error:
        raise NotCheckedError(described(error)) from error


def _check_layer(layer: ExpertsLayer, kernels: dict[str, CheckedKernel], num_experts: int) -> CheckResult:
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(layer.name.encode()))
    experts = torch.randperm(layer.num_local_experts, generator=generator, device="cpu")[:num_experts].tolist()
    dense = {expert: layer.format.dense_expert(layer.weights, expert) for expert in experts}
    worst = CheckResult(0.0, "")
    for name, kernel in kernels.items():
        for tokens in kernel.tokens:
            tried = _Trial(layer, dense, tokens, generator, rounded=kernel.rounds_activations)
            try:
                result = tried.result_of(kernel)
            except (NotCheckedError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, the layer must be computed by something else
                result = CheckResult(math.inf, described(error))
            if result.reason:
                return CheckResult(result.error, f"{name}: {result.reason}")
            if result.error > worst.error:
                worst = result
    return worst


class _Trial:
    """One call of a kernel at one number of tokens. Shares no code with the ops on purpose."""

    def __init__(
        self,
        layer: ExpertsLayer,
        dense: dict[int, tuple[torch.Tensor, torch.Tensor]],
        tokens: int,
        generator: torch.Generator,
        *,
        rounded: bool,
    ) -> None:
        self._layer = layer
        self._dense = dense
        self._tokens = tokens
        self._generator = generator
        self._rounded = rounded
        self._device = layer.weights.w13.device
        self._rows = _compared_rows(tokens, layer.hidden_size, generator)

    def result_of(self, kernel: CheckedKernel) -> CheckResult:
        """Run the kernel, and replay a graph of it where it can be captured; return the worse result."""
        call, local_ids = self._call()
        kernel.run(call)
        result = self._compared(call, local_ids)
        if result.reason or kernel.capture is None or self._tokens > kernel.captured_up_to:
            return result
        replay = kernel.capture(call)
        fresh, local_ids = self._call()
        for name in ("x", "topk_weights", "topk_ids"):
            getattr(call, name).copy_(getattr(fresh, name))
        call.out.fill_(math.nan)
        replay()
        replayed = self._compared(call, local_ids)
        if replayed.reason:
            return CheckResult(replayed.error, f"in a replayed graph: {replayed.reason}")
        return max(result, replayed, key=lambda each: each.error)

    def _call(self) -> tuple[ExpertsCall, torch.Tensor]:
        """Return a call on new inputs, and its local expert ids [T, k]: -1 where nothing is computed."""
        layer, tokens = self._layer, self._tokens
        routed = _route(layer, list(self._dense), tokens, self._generator)
        drawn = torch.randn(min(tokens, _DRAWN_ROWS), layer.hidden_size, generator=self._generator, **_ON_HOST)
        x = _more_rows(drawn.to(self._device, layer.dtype), tokens)
        call = ExpertsCall(
            # Poisoned: a row that the kernel leaves out is not a number.
            out=torch.full((tokens, layer.hidden_size), math.nan, dtype=layer.dtype, device=self._device),
            x=x,
            topk_weights=routed.weights.to(self._device),
            topk_ids=routed.global_ids.to(self._device, torch.int32),
            expert_map=layer.expert_map,
            w13_bias=layer.w13_bias,
            w2_bias=layer.w2_bias,
        )
        return call, routed.local_ids.to(self._device)

    def _compared(self, call: ExpertsCall, local_ids: torch.Tensor) -> CheckResult:
        exact = torch.float64 if self._layer.dtype == torch.float32 else torch.float32
        shares = {expert: share.double() for expert, share in self._shares(call, local_ids, exact).items()}
        want = torch.stack(list(shares.values())).sum(dim=0)
        in_dtype = self._in_torch(call, local_ids, self._layer.dtype).double()
        got = call.out[self._rows.to(self._device)].double()
        # Where the exact result is not a number or too large for the dtype, it says nothing about the kernel.
        finite = want.abs() <= torch.finfo(self._layer.dtype).max / 2
        if not bool(finite.any()):
            return CheckResult(0.0, "")
        scale = want[finite].abs().max().item()
        spacing = torch.finfo(self._layer.dtype).eps * (16 if self._layer.dtype == torch.float32 else 1)
        torch_error = (in_dtype - want)[finite].abs().max().item()
        allowed = spacing * scale + (2 * torch_error if math.isfinite(torch_error) else 0.0)
        error = (got - want)[finite].abs().max().item()
        if not error <= allowed:  # also for NaN, which goes into the proof as infinite
            share = error / allowed if allowed and math.isfinite(error) else math.inf
            return CheckResult(share, f"error {error:.3g} on {self._tokens} tokens, allowed {allowed:.3g}")
        largest = CheckResult(error / allowed if allowed else 0.0, "")
        rounded = self._in_torch(call, local_ids, torch.float32).double()
        factors = _compared_factors(shares, got, rounded, finite & rounded.isfinite(), self._tokens)
        return max(largest, factors, key=lambda each: (bool(each.reason), each.error))

    def _in_torch(self, call: ExpertsCall, local_ids: torch.Tensor, product: torch.dtype) -> torch.Tensor:
        """Return the compared rows as torch gives them with every result in the layer's dtype.

        Args:
            call: what is computed.
            local_ids: of its tokens.
            product: type of the factors of a product. FP32 keeps weights and routing weights as they are: stored in FP8
                with one scale they have so few values that rounding them to BF16 has a direction.
        """
        out = torch.zeros(len(self._rows), self._layer.hidden_size, dtype=self._layer.dtype, device=self._device)
        shares = self._shares(call, local_ids, product, rounded=self._rounded, result=self._layer.dtype)
        for share in shares.values():
            out += share.to(out.dtype)
        return out

    def _shares(
        self,
        call: ExpertsCall,
        local_ids: torch.Tensor,
        dtype: torch.dtype,
        *,
        rounded: bool = False,
        result: torch.dtype | None = None,
    ) -> dict[int, torch.Tensor]:
        """Return what each expert adds to the compared rows: products in `dtype`, results rounded to `result`."""
        layer, rows = self._layer, self._rows.to(self._device)
        ids, weights = local_ids[rows], call.topk_weights[rows]
        x = (_rounded_to_fp8(call.x[rows]) if rounded else call.x[rows]).to(dtype)
        kept = dtype if result is None else result
        shares = {}
        # Every row through every expert: which rows are an expert's would have to be read on the host, again and again.
        for expert, (w13, w2) in self._dense.items():
            gate_up = (x @ w13.to(dtype).T).to(kept)
            if layer.w13_bias is not None:
                gate_up = gate_up + layer.w13_bias[expert].to(kept)
            hidden = _activated(gate_up, layer.format.activation)
            down = ((_rounded_to_fp8(hidden) if rounded else hidden).to(dtype) @ w2.to(dtype).T).to(kept)
            if layer.w2_bias is not None:
                down = down + layer.w2_bias[expert].to(kept)
            chosen = ids == expert
            weight = weights.where(chosen, 0).sum(dim=1, keepdim=True)
            share = down.to(dtype) * weight.to(dtype)
            shares[expert] = share.where(chosen.any(dim=1, keepdim=True), 0)
        return shares


def _activated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the input of the down projection; "swigluoai" has gate and up columns in turn."""
    if activation == "swigluoai":
        gate, up = gate_up[:, 0::2].clamp(max=_CLAMP), gate_up[:, 1::2].clamp(-_CLAMP, _CLAMP)
        return gate * torch.sigmoid(_SLOPE * gate) * (up + 1)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _more_rows(drawn: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return so many rows: those drawn, then the same with their columns moved on by one more each time."""
    times = -(-tokens // drawn.shape[0])
    return torch.cat([drawn.roll(count, dims=1) for count in range(times)])[:tokens]


def _compared_rows(tokens: int, hidden_size: int, generator: torch.Generator) -> torch.Tensor:
    """Return the rows of a call that are compared: all, or both ends and some between."""
    rows = max(_COMPARED_ROWS, _COMPARED_VALUES // hidden_size)
    if tokens <= rows:
        return torch.arange(tokens, device="cpu")
    ends = torch.arange(rows // 4, device="cpu")
    between = torch.randint(tokens, (rows // 2,), generator=generator, device="cpu")
    return torch.cat([ends, between, tokens - 1 - ends])


def _compared_factors(
    shares: dict[int, torch.Tensor], got: torch.Tensor, rounded: torch.Tensor, finite: torch.Tensor, tokens: int
) -> CheckResult:
    """Compare the factor that each expert's share is scaled by with 1; see the module's docstring."""
    matrix = torch.stack(list(shares.values()))[:, finite].T
    largest = matrix.abs().max().item() if matrix.numel() else 0.0
    if not largest:
        return CheckResult(0.0, "")
    # Scaled first: the square of a small output would be zero.
    matrix = matrix / largest
    norms = matrix.norm(dim=0)
    used = (norms > 1e-3).nonzero()[:, 0]
    matrix, norms = matrix[:, used], norms[used]
    got, rounded = got[finite] / largest, rounded[finite] / largest
    products = _on_host((matrix / norms).T @ (matrix / norms))
    names = [f"expert {list(shares)[position]}" for position in used.tolist()]
    if torch.linalg.eigvalsh(products).min().item() < _WELL_CONDITIONED:
        # Experts with the same outputs, or too few rows: only their sum has a factor.
        matrix, names = matrix.sum(dim=1, keepdim=True), ["the output"]
        norms = matrix.norm(dim=0)
        products = _on_host(torch.ones(1, 1, dtype=matrix.dtype))
    inverse = torch.linalg.inv(products)
    want = matrix.sum(dim=1)
    lengths = _on_host(norms)

    def deviations(values: torch.Tensor) -> torch.Tensor:
        return (inverse @ _on_host((matrix / norms).T @ (values - want)) / lengths).abs()

    noise = _on_host((rounded - want).square().mean().sqrt())
    standard = noise * inverse.diagonal().sqrt() / lengths
    allowed = _FACTOR_BASE + 2 * deviations(rounded) + _STANDARD_ERRORS * standard
    off = deviations(got)
    share, position = (off / allowed).max(dim=0)
    if share.item() <= 1:
        return CheckResult(share.item(), "")
    place = int(position)
    return CheckResult(
        share.item() if math.isfinite(share.item()) else math.inf,
        f"error: the factor of {names[place]} is off by {off[place].item():.2%} on {tokens} tokens, "
        f"allowed {allowed[place].item():.2%}",
    )


def _on_host(small: torch.Tensor) -> torch.Tensor:
    """Return a few numbers on the CPU: for these the GPU's linear algebra takes a second to load, and milliseconds."""
    return small.to("cpu")


@dataclass(frozen=True, slots=True)
class _Routing:
    local_ids: torch.Tensor
    """int64 [T, k]; -1 where the expert is on another rank, and in the padding row."""
    global_ids: torch.Tensor
    weights: torch.Tensor


def _route(layer: ExpertsLayer, experts: list[int], tokens: int, generator: torch.Generator) -> _Routing:
    """Route tokens to the experts. The last of several is padding as vLLM has it since 0.32: expert -1, weight 0."""
    choice = torch.randint(len(experts), (tokens, layer.top_k), generator=generator, device="cpu")
    local_ids = torch.tensor(experts, device="cpu")[choice]
    weights = torch.rand(tokens, layer.top_k, generator=generator, **_ON_HOST)
    global_ids = local_ids.clone()
    if layer.expert_map is not None:
        mapping = layer.expert_map.cpu().long()
        to_global = torch.full((layer.num_local_experts,), -1, dtype=torch.int64, device="cpu")
        here = (mapping >= 0).nonzero()[:, 0]
        to_global[mapping[here]] = here
        global_ids = to_global[local_ids]
        elsewhere = (mapping < 0).nonzero()[:, 0]
        if elsewhere.numel():
            # A kernel that ignores the map computes this slot too.
            global_ids[0, 0], local_ids[0, 0] = elsewhere[0], -1
    if tokens > 1:
        global_ids[-1], local_ids[-1], weights[-1] = -1, -1, 0
    return _Routing(local_ids, global_ids, weights)


def _rounded_to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Return the values [n, columns] rounded to E4M3, with one scale per row and `_GROUP` columns."""
    columns = values.shape[1]
    padded = torch.nn.functional.pad(values.float(), (0, -columns % _GROUP)).unflatten(1, (-1, _GROUP))
    scale = padded.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    rounded = (padded / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(1)[:, :columns].to(values.dtype)
