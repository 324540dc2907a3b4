"""Tunes vLLM's Triton MoE kernel: searches, compares, writes the rows that win.

A process of its own, see `measure.process`: a launch that crashes the GPU's context ends this process and no other, and
what was measured is kept. Its result is the verdicts.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_optimizer.errors import InputError
from moe_optimizer.files import write_atomically
from moe_optimizer.inspection.tuned_configs import FOLDER_VARIABLE, Row, state_path
from moe_optimizer.inspection.tuning_state import TuneState, Verdict, load_state
from moe_optimizer.measure.process import OnStep, answer_request
from moe_optimizer.measure.triton_tuning.rows import file_rows, reach
from moe_optimizer.measure.triton_tuning.search import best_of, fits, key_of, row_of, search, seeds
from moe_optimizer.plan.json_codec import encode
from moe_optimizer.specs.triton_shape import Experts, TritonShape

if TYPE_CHECKING:
    from moe_optimizer.measure.triton_tuning.bench import TritonBench

MARGIN = 1.03
"""Chosen: a row replaces vLLM's when it is faster by this much; less is within the noise of clocks and placement."""
_SEARCH_SHARE = 0.7
"""Chosen: share of the budget for the search; the rest is for comparing the best rows with vLLM's own in turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What to tune and where to write it."""

    shape: TritonShape
    num_experts: int
    """Of the whole layer."""
    top_k: int
    hidden_size: int
    dtype: str
    """Of the activations."""
    tokens: tuple[int, ...]
    """Sizes to tune."""
    budget_s: float
    folder: str
    shipped_folder: str
    """vLLM's own configurations, for rows to start from."""

    @property
    def experts(self) -> Experts:
        """What to measure."""
        return Experts(
            num_experts=self.num_experts,
            local_experts=self.shape.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            width=self.shape.width,
            dtype=self.dtype,
            scheme=self.shape.dtype if self.shape.dtype == "fp8_w8a8" else "",
            block=self.shape.block,
        )


def tune(
    request: TuneRequest, bench: TritonBench, on_step: OnStep, *, now: Callable[[], float] = time.monotonic
) -> TuneState:
    """Search every size, compare its best row with vLLM's own in turns, write the rows that won; return the state.

    No file is written when nothing won.

    Raises:
        InputError: there is a configuration of this name that no tuning made.
    """
    config = Path(request.folder) / request.shape.file_name
    if config.exists() and not state_path(config).exists():
        raise InputError(f"{config}: was not made by a tuning, and is not replaced", hint="name another --folder")
    begun = now()
    state = load_state(state_path(config), _identity(request, bench))
    sizes = sorted(set(request.tokens))

    search_end = begun + _SEARCH_SHARE * request.budget_s
    for done, tokens in enumerate(sizes):
        share = (search_end - now()) / (len(sizes) - done)
        _search_size(request, bench, state, tokens, end=now() + share, now=now, config=config)
        on_step(_SEARCH_SHARE * (done + 1) / len(sizes), f"{tokens} tokens: {_so_far(state, bench, tokens)}")
    reaches = reach(sizes)
    end = begun + request.budget_s
    for done, tokens in enumerate(sizes):
        if now() < end:
            _compare_size(bench, state, tokens, reaches[tokens])
            state.store(state_path(config))
        bench.forget(tokens)
        on_step(_SEARCH_SHARE + (1 - _SEARCH_SHARE) * (done + 1) / len(sizes), f"{tokens} tokens compared")
    _write(config, bench, state)
    return state


def _identity(request: TuneRequest, bench: TritonBench) -> dict[str, Any]:
    kept = {name: getattr(request, name) for name in ("shape", "num_experts", "top_k", "hidden_size", "dtype")}
    return {**encode(kept), "vllm": bench.vllm_version, "triton": bench.triton_version}


def _search_size(
    request: TuneRequest,
    bench: TritonBench,
    state: TuneState,
    tokens: int,
    *,
    end: float,
    now: Callable[[], float],
    config: Path,
) -> None:
    known = state.measured.setdefault(str(tokens), {})
    element = 1 if request.shape.dtype == "fp8_w8a8" else 4 if request.dtype == "float32" else 2

    def measure(row: Row) -> float | None:
        key = key_of(row)
        if key not in known:
            if not fits(row, weight_bytes=element):
                return None
            state.trying = (str(tokens), key)
            state.store(state_path(config))
            try:
                known[key] = bench.quick_us(row, tokens)
            except (KeyboardInterrupt, SystemExit):
                # Somebody stopped the process, not the row, which is tried again; after any other end it is not.
                state.trying = None
                state.store(state_path(config))
                raise
            state.trying = None
            state.store(state_path(config))
        return known[key]

    seeded = seeds(Path(request.shipped_folder), request.shape, tokens)
    search(bench.stock_row(tokens), seeded, measure, time_left=lambda: now() < end, seed=tokens)


def _so_far(state: TuneState, bench: TritonBench, tokens: int) -> str:
    known = state.measured[str(tokens)]
    best, stock = best_of(known), known.get(key_of(bench.stock_row(tokens)))
    if best is None or stock is None:
        return f"{len(known)} rows tried"
    return f"{len(known)} rows tried, the best {stock / best[1]:.2f}x"


def _compare_size(bench: TritonBench, state: TuneState, tokens: int, reached: tuple[int, int]) -> None:
    """Time the best row and vLLM's own in turns at a size, and where it won, at the ends of its reach."""
    state.verdicts.pop(str(tokens), None)
    stock, best = bench.stock_row(tokens), best_of(state.measured[str(tokens)])
    row = stock if best is None else row_of(best[0])
    if row == stock:
        return
    samples = bench.interleaved_us([stock, row], tokens)
    if samples is None:
        return
    ratio = _ratio(samples)
    low, high = tokens, tokens - 1
    if ratio >= MARGIN:
        low = reached[0] if _not_slower(bench, row, reached[0]) else tokens
        high = reached[1] if _not_slower(bench, row, reached[1]) else tokens
    state.verdicts[str(tokens)] = Verdict(
        tokens=tokens,
        stock=stock,
        row=row,
        stock_us=statistics.median(samples[0]),
        row_us=statistics.median(samples[1]),
        ratio=ratio,
        low=low,
        high=high,
    )


def _not_slower(bench: TritonBench, row: Row, tokens: int) -> bool:
    samples = bench.interleaved_us([bench.stock_row(tokens), row], tokens)
    bench.forget(tokens)
    return samples is not None and _ratio(samples) >= 1.0


def _ratio(samples: list[list[float]]) -> float:
    return statistics.median(stock / row for stock, row in zip(*samples, strict=True))


def _write(config: Path, bench: TritonBench, state: TuneState) -> None:
    # Verdicts of an earlier run may reach over sizes of this one: each ends halfway to the next size that was searched.
    reaches = reach([int(tokens) for tokens in state.measured])
    wins = []
    for verdict in state.verdicts.values():
        low, high = reaches[verdict.tokens]
        if verdict.won:
            wins.append(replace(verdict, low=max(verdict.low, low), high=min(verdict.high, high)))
    if not wins:
        config.unlink(missing_ok=True)  # an earlier tuning's, whose rows do not win any more
        return
    rows = file_rows(bench.stock_row, wins)
    data = {"triton_version": bench.triton_version, **{str(tokens): row for tokens, row in sorted(rows.items())}}
    write_atomically(config, json.dumps(data, indent=1) + "\n")


def _tune(request: TuneRequest, on_step: OnStep) -> list[Verdict]:
    # A row must beat what vLLM takes without a configuration of ours.
    os.environ.pop(FOLDER_VARIABLE, None)
    on_step(0.0, "starting vLLM's kernels")
    from moe_optimizer.measure.triton_tuning.bench import TritonBench

    return list(tune(request, TritonBench(request.experts), on_step).verdicts.values())


if __name__ == "__main__":
    sys.exit(answer_request(TuneRequest, sys.argv[1:], _tune))
