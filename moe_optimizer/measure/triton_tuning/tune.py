"""Tuning vLLM's Triton MoE kernel: search, compare, write. Runs as a process of its own.

    python -m moe_optimizer.measure.triton_tuning.tune REQUEST.json EVENTS_FD

REQUEST.json is a `TuneRequest`; one JSON object a line goes to the file descriptor EVENTS_FD: {"progress": share,
"text": what} on the way, {"refused": why} or {"done": {...}} at the end. A launch that crashes the GPU's context
ends this process and no other; what was measured is kept.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moe_optimizer.errors import InputError, MoeOptimizerError
from moe_optimizer.files import write_atomically
from moe_optimizer.inspection.json_file import read_json_object
from moe_optimizer.inspection.tuned_configs import FOLDER_VARIABLE, Row, state_path
from moe_optimizer.measure.triton_tuning.rows import Win, file_rows, reach
from moe_optimizer.measure.triton_tuning.search import fits, key_of, row_of, search, seeds
from moe_optimizer.measure.triton_tuning.state import TuneState, Verdict, load_state
from moe_optimizer.specs.triton_shape import Experts, TritonShape

MARGIN = 1.03
"""Chosen: a row replaces stock when it is faster by this much; less is within what clocks and placement change."""
_SEARCH_SHARE = 0.7
"""Chosen: share of the budget for the search; the rest is for comparing the best rows with stock in turns."""

Report = Callable[[dict[str, Any]], None]


class Bench(Protocol):
    """What measures: `tune_bench.TritonBench`, or a stand-in without a GPU."""

    @property
    def vllm_version(self) -> str:
        """The vLLM whose kernel it is."""
        ...

    @property
    def triton_version(self) -> str:
        """The Triton that compiles it."""
        ...

    def stock_row(self, tokens: int) -> Row:
        """Return what vLLM takes now."""
        ...

    def quick_us(self, row: Row, tokens: int) -> float | None:
        """Return microseconds of one call, None where the row does not work."""
        ...

    def interleaved_us(self, rows: list[Row], tokens: int) -> list[list[float]] | None:
        """Return microseconds of every row and round, taken in turns."""
        ...

    def forget(self, tokens: int) -> None:
        """Free what a size needs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What to tune and where to write it."""

    shape: dict[str, Any]
    """A `TritonShape`, as an object."""
    num_experts: int
    """Of the whole layer."""
    top_k: int
    hidden_size: int
    dtype: str
    """Of the activations."""
    tokens: list[int]
    """Sizes to tune."""
    budget_s: float
    folder: str
    shipped_folder: str
    """vLLM's own configurations, for rows to start from."""

    @property
    def triton_shape(self) -> TritonShape:
        """The shape as its type."""
        block = self.shape["block"]
        return TritonShape(**{**self.shape, "block": tuple(block) if block else None})

    @property
    def experts(self) -> Experts:
        """What to measure."""
        shape = self.triton_shape
        return Experts(
            num_experts=self.num_experts,
            local_experts=shape.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            width=shape.width,
            dtype=self.dtype,
            scheme=shape.dtype if shape.dtype == "fp8_w8a8" else "",
            block=shape.block,
        )


def tune(request: TuneRequest, bench: Bench, report: Report, *, now: Callable[[], float] = time.monotonic) -> TuneState:
    """Search every size, compare its best row with stock in turns, write the rows that won; return the state.

    No file is written when nothing won.

    Raises:
        InputError: there is a configuration of this name that no tuning made.
    """
    config = Path(request.folder) / request.triton_shape.file_name
    if config.exists() and not state_path(config).exists():
        raise InputError(f"{config}: was not made by a tuning, and is not replaced", hint="name another --folder")
    begun = now()
    state = load_state(state_path(config), _identity(request, bench))
    sizes = sorted(set(request.tokens))

    def progress(share: float, text: str) -> None:
        report({"progress": share, "text": text})

    search_end = begun + _SEARCH_SHARE * request.budget_s
    for done, tokens in enumerate(sizes):
        share = (search_end - now()) / (len(sizes) - done)
        _search_size(request, bench, state, tokens, end=now() + share, now=now, config=config)
        progress(_SEARCH_SHARE * (done + 1) / len(sizes), f"{tokens} tokens: {_so_far(state, bench, tokens)}")
    reaches = reach(sizes)
    end = begun + request.budget_s
    for done, tokens in enumerate(sizes):
        if now() < end:
            _compare_size(bench, state, tokens, reaches[tokens])
            state.store(state_path(config))
        bench.forget(tokens)
        progress(_SEARCH_SHARE + (1 - _SEARCH_SHARE) * (done + 1) / len(sizes), f"{tokens} tokens compared")
    _write(config, bench, state)
    return state


def _identity(request: TuneRequest, bench: Bench) -> dict[str, Any]:
    kept = {name: getattr(request, name) for name in ("shape", "num_experts", "top_k", "hidden_size", "dtype")}
    return json.loads(json.dumps({**kept, "vllm": bench.vllm_version, "triton": bench.triton_version}))


def _search_size(
    request: TuneRequest,
    bench: Bench,
    state: TuneState,
    tokens: int,
    *,
    end: float,
    now: Callable[[], float],
    config: Path,
) -> None:
    known = state.measured.setdefault(str(tokens), {})
    element = 1 if request.triton_shape.dtype == "fp8_w8a8" else 4 if request.dtype == "float32" else 2

    def measure(row: Row) -> float | None:
        key = key_of(row)
        if key not in known:
            if not fits(row, weight_bytes=element):
                return None
            state.trying = [str(tokens), key]
            state.store(state_path(config))
            try:
                known[key] = bench.quick_us(row, tokens)
            except (KeyboardInterrupt, SystemExit):
                # Stopped by somebody, not by the row: it is tried again. After any other end it is not.
                state.trying = None
                state.store(state_path(config))
                raise
            state.trying = None
            state.store(state_path(config))
        return known[key]

    seeded = seeds(Path(request.shipped_folder), request.triton_shape, tokens)
    search(bench.stock_row(tokens), seeded, measure, time_left=lambda: now() < end, seed=tokens)


def _so_far(state: TuneState, bench: Bench, tokens: int) -> str:
    known = state.measured[str(tokens)]
    best, stock = _best_row(known), known.get(key_of(bench.stock_row(tokens)))
    if best is None or stock is None:
        return f"{len(known)} rows tried"
    return f"{len(known)} rows tried, the best {stock / known[key_of(best)]:.2f}x"  # type: ignore[operator]


def _best_row(known: dict[str, float | None]) -> Row | None:
    works = [(time_us, key) for key, time_us in known.items() if time_us is not None]
    return row_of(min(works)[1]) if works else None


def _compare_size(bench: Bench, state: TuneState, tokens: int, reached: tuple[int, int]) -> None:
    """Time the best row and stock in turns at a size, and where it won, at the ends of its reach."""
    state.verdicts.pop(str(tokens), None)
    stock, row = bench.stock_row(tokens), _best_row(state.measured[str(tokens)])
    if row is None or row == stock:
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


def _not_slower(bench: Bench, row: Row, tokens: int) -> bool:
    samples = bench.interleaved_us([bench.stock_row(tokens), row], tokens)
    bench.forget(tokens)
    return samples is not None and _ratio(samples) >= 1.0


def _ratio(samples: list[list[float]]) -> float:
    return statistics.median(stock / row for stock, row in zip(*samples, strict=True))


def _write(config: Path, bench: Bench, state: TuneState) -> None:
    # Verdicts of an earlier run may reach over sizes of this one: each ends halfway to the next size that was searched.
    reaches = reach([int(tokens) for tokens in state.measured])
    wins = [
        Win(
            tokens=verdict.tokens,
            row=verdict.row,
            low=max(verdict.low, reaches[verdict.tokens][0]),
            high=min(verdict.high, reaches[verdict.tokens][1]),
        )
        for verdict in state.verdicts.values()
        if verdict.won
    ]
    if not wins:
        config.unlink(missing_ok=True)  # an earlier tuning's, whose rows do not win any more
        return
    rows = file_rows(bench.stock_row, wins)
    data = {"triton_version": bench.triton_version, **{str(tokens): row for tokens, row in sorted(rows.items())}}
    write_atomically(config, json.dumps(data, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Run one tuning as a process; see the module's docstring."""
    request_path, events = Path(arguments[0]), int(arguments[1])

    def report(event: dict[str, Any]) -> None:
        os.write(events, (json.dumps(event) + "\n").encode())

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # What vLLM takes without us is what a row has to beat.
    os.environ.pop(FOLDER_VARIABLE, None)
    try:
        request = TuneRequest(**read_json_object(request_path))  # type: ignore[arg-type]
        report({"progress": 0.0, "text": "starting vLLM's kernels"})
        from moe_optimizer.measure.triton_tuning.bench import TritonBench

        state = tune(request, TritonBench(request.experts), report)
    except MoeOptimizerError as error:
        report({"refused": str(error), "hint": error.hint, "exit_code": int(error.exit_code)})
        return int(error.exit_code)
    report({"done": [dataclasses.asdict(verdict) for verdict in state.verdicts.values()]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
