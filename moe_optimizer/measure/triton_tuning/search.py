"""Searches launch parameters: which to try, in which order. A function measures them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.tuned_configs import Row, nearest, read_rows
from moe_optimizer.specs.triton_shape import TritonShape

Measure = Callable[[Row], float | None]
"""Microseconds of one call with these launch parameters; None when they do not work."""

VALUES: Mapping[str, tuple[int, ...]] = {
    "num_stages": (2, 3, 4, 5),
    "num_warps": (2, 4, 8),
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128, 256),
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "GROUP_SIZE_M": (1, 8, 16, 32, 64),
}
"""The values of each parameter, the parameters that matter most first."""
SHARED_MEMORY_BYTES = 227 * 1024
"""What a block of a data-centre GPU from Hopper on can have; more fails to launch, after seconds of compilation."""
_NUM_SEEDS = 10
"""Chosen: rows of other shapes on the same GPU tried before the search moves on its own."""
_BETTER = 1.01
"""Chosen: a step is taken when it gains more than the noise of a quick measurement."""


def key_of(row: Row) -> str:
    """Return the parameters as text, the same for equal rows."""
    return ",".join(f"{name}={row[name]}" for name in sorted(row))


def row_of(key: str) -> Row:
    """Return the row whose `key_of` is `key`."""
    return {name: int(value) for name, _, value in (part.partition("=") for part in key.split(","))}


def seeds(folder: Path, shape: TritonShape, tokens: int) -> list[Row]:
    """Return the rows that shipped files of the same GPU and dtype have near a size, the most frequent first."""
    ending = shape.file_name.partition(",device_name=")[2]
    counts: Counter[str] = Counter()
    rows: dict[str, Row] = {}
    for path in sorted(folder.glob("E=*.json")):
        if path.name.partition(",device_name=")[2] != ending:
            continue
        try:
            row = _completed(nearest(read_rows(path), tokens))
        except InputError:  # a file of another kind of kernel: no seed
            continue
        counts[key_of(row)] += 1
        rows[key_of(row)] = row
    return [rows[key] for key, _ in counts.most_common(_NUM_SEEDS)]


def fits(row: Row, *, weight_bytes: int) -> bool:
    """Whether the tiles of all stages fit a block's shared memory.

    Args:
        row: launch parameters.
        weight_bytes: bytes of an element of weights and activations.
    """
    tiles = (row["BLOCK_SIZE_M"] + row["BLOCK_SIZE_N"]) * row["BLOCK_SIZE_K"] * weight_bytes
    return tiles * row.get("num_stages", 1) <= SHARED_MEMORY_BYTES


def neighbours(row: Row) -> Iterator[Row]:
    """Yield the rows in which one parameter is the next smaller or larger."""
    for name, values in VALUES.items():
        if name not in row:
            continue
        below = [value for value in values if value < row[name]]
        above = [value for value in values if value > row[name]]
        for value in (*below[-1:], *above[:1]):
            yield {**row, name: value}


def search(
    start: Row, seeded: Sequence[Row], measure: Measure, *, time_left: Callable[[], bool], seed: int
) -> dict[str, float | None]:
    """Try the start, the seeds, then climb from the best by single steps; return everything tried.

    Args:
        start: what vLLM takes now.
        seeded: rows worth a try.
        measure: asked once for each row.
        time_left: asked before each; once it says no, the search ends (the start is always measured).
        seed: of the order of steps.

    Returns:
        key_of(row) -> microseconds, None for rows that do not work.
    """
    order = random.Random(seed)
    tried: dict[str, float | None] = {}
    rows = {key_of(start): dict(start)}

    def attempt(candidates: Iterable[Row]) -> bool:
        """Measure candidates until one is clearly better than the best so far; return whether one was."""
        for row in candidates:
            key = key_of(row)
            if key in tried:
                continue
            if tried and not time_left():
                return False
            before = best_of(tried)
            tried[key] = measure(row)
            rows[key] = dict(row)
            got = tried[key]
            if got is not None and before is not None and got * _BETTER < before[1]:
                return True
        return False

    attempt([start])
    while attempt(seeded):
        pass
    while True:
        best = best_of(tried)
        steps = list(neighbours(rows[best[0]])) if best else []
        order.shuffle(steps)
        if not attempt(steps):
            return tried


def best_of(tried: Mapping[str, float | None]) -> tuple[str, float] | None:
    """Return the fastest of the rows that work, by its key, and its microseconds."""
    works = [(time, key) for key, time in tried.items() if time is not None]
    return (min(works)[1], min(works)[0]) if works else None


def _completed(row: Row) -> Row:
    """Return a shipped row with the parameters that older files leave to the kernel's defaults."""
    return {"SPLIT_K": 1, "num_warps": 4, "num_stages": 3, **row}
