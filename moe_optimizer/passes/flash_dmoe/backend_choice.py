"""Compares our kernels, beside vLLM's Triton, with vLLM's other MoE backends, each of which computes a whole server."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_optimizer.passes.flash_dmoe.kernel_choice import nearest_row
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.specs.kernel_speeds import (
    MARGIN,
    STOCK,
    STOCK_BACKENDS,
    KernelSpeeds,
    TokenRange,
    TokenSpeeds,
    kernel_for,
)

FLAG = "--moe-backend"
TRITON = STOCK_BACKENDS["cuda"]
Times = Callable[[TokenSpeeds], float]
"""What one way of computing takes at a measured number of tokens; infinite where it was not measured."""


def with_ours(ranges: Sequence[TokenRange]) -> Times:
    """Return the times of our kernels in their ranges and vLLM's Triton elsewhere."""

    def times(row: TokenSpeeds) -> float:
        use = kernel_for(ranges, row.tokens)
        return row.stock_us if use == STOCK else row.ours_us[use]

    return times


def of_backend(name: str) -> Times:
    """Return the times of a backend of vLLM's."""
    if name in ("", TRITON):
        return lambda row: row.stock_us
    return lambda row: row.peers_us.get(name, float("inf"))


def never_slower_than(times: Times, others: Times, rows: Sequence[TokenSpeeds]) -> bool:
    """Return whether one way is never slower than another, up to the margin, and gains somewhere."""
    ratios = [others(row) / times(row) for row in rows]
    return all(times(row) < float("inf") for row in rows) and min(ratios) >= 1 - MARGIN and max(ratios) >= 1 + MARGIN


def best_backend(table: KernelSpeeds, ours: Times, batch: int, names: Sequence[str]) -> str:
    """Return the backend of vLLM's that takes less than everything else at the batch size, and not more at any other
    measured number of tokens; "" where there is none.

    Args:
        table: the measured layer.
        ours: what our kernels take where they win, beside Triton.
        batch: requests of a decode step.
        names: the backends that this server can be told to use.
    """
    at = nearest_row(table.rows, batch)
    for name in sorted(names, key=lambda name: of_backend(name)(at)):
        its = of_backend(name)
        rivals = [ours] if name == table.backend else [ours, of_backend(table.backend)]
        if all(never_slower_than(its, rival, table.rows) and its(at) <= (1 - MARGIN) * rival(at) for rival in rivals):
            return name
    return ""


def selectable(ctx: PlanContext, table: KernelSpeeds, *, formats: int) -> tuple[str, ...]:
    """Return the measured backends that `--moe-backend` may name for this server.

    Args:
        ctx: what the plan is made from.
        table: the measured layer.
        formats: in how many formats the experts of the model may be: a backend is for all layers, and vLLM ends where
            it does not compute one of them.
    """
    if FLAG in ctx.pinned or ctx.request.inside_vllm or formats > 1:
        return ()
    names = {name for row in table.rows for name in row.peers_us}
    return tuple(sorted(name for name in names if not _why_never(ctx, name)))


def _why_never(ctx: PlanContext, name: str) -> str:
    """Return why vLLM refuses a backend for the way in which these experts are quantised, or ""."""
    channels = ctx.model.quant_method is None and (ctx.pinned.value("--quantization") == "fp8_per_channel")
    if name == "cutlass" and not channels and ctx.model.quant_method != "compressed-tensors":
        return "vLLM has it for compressed-tensors and fp8_per_channel only"
    if channels and name in ("marlin", "flashinfer_cutlass", "flashinfer_trtllm"):
        return "vLLM does not have it for fp8_per_channel"
    return ""


def compared(table: KernelSpeeds, chosen: Times, batch: int, *, without: str = "") -> dict[str, str]:
    """Return every other backend of vLLM's with how it compares: "--moe-backend marlin" -> "1.31x of ... at 64 tokens".

    Args:
        table: the measured layer.
        chosen: what the plan's choice takes.
        batch: requests of a decode step.
        without: a backend that is the choice itself.
    """
    found = {f"{FLAG} {name}": f"not available: {why}" for name, why in table.unavailable.items()}
    names = {name for row in table.rows for name in row.peers_us} - {without}
    for name in sorted(names):
        rows = [row for row in table.rows if name in row.peers_us]
        at = nearest_row(rows, batch)
        worst = max(rows, key=lambda row: row.peers_us[name] / chosen(row))
        text = f"takes {_ratio(at.peers_us[name], chosen(at))} of the time at {_tokens(at)}"
        if worst is not at:
            text += f", {_ratio(worst.peers_us[name], chosen(worst))} at {_tokens(worst)}"
        found[f"{FLAG} {name}"] = text
    return found


def in_words(name: str, its: Times, other: Times, rows: Sequence[TokenSpeeds], batch: int) -> str:
    """Return by how much a backend is faster: "vLLM's deep_gemm measured 1.30x faster than ... at 64 tokens"."""
    at = nearest_row(rows, batch)
    return f"vLLM's {name} measured {_ratio(other(at), its(at))} faster at {_tokens(at)}"


def _ratio(first: float, second: float) -> str:
    return f"{first / second:.2f}x"


def _tokens(row: TokenSpeeds) -> str:
    return "1 token" if row.tokens == 1 else f"{row.tokens} tokens"
