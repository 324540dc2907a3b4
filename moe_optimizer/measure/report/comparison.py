"""Puts two results of a benchmark side by side, if they were measured under the same conditions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_json
from moe_optimizer.measure.bench.result import RESULT_FILE
from moe_optimizer.measure.bench.side import STOCK
from moe_optimizer.measure.bench.trace import Load

_MAX_BYTES = 64 << 20
_CONDITIONS = ("model", "device", "gpus", "cores", "driver", "vllm", "torch", "workload")
"""Keys of an environment that change speed; a result that does not name one may differ in it."""
_METRICS = {"output_tokens_per_s": "tokens/s", "tpot_ms": "TPOT ms", "ttft_ms": "TTFT ms"}
_HIGHER_IS_BETTER = "output_tokens_per_s"
_UNKNOWN = "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A median; its interval is None where the result has none."""

    median: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a file says was measured."""

    origin: str
    environment: Mapping[str, str]
    values: Mapping[str, Mapping[tuple[str, str], Value]]
    """Side -> (load, metric) -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric of one side under one load, in both files."""

    load: str
    side: str
    """As the first file calls it."""
    second_side: str
    """The same name, unless the files have no side of the same name."""
    metric: str
    first: Value
    second: Value
    ratio: float
    """How much faster the second is: above 1 is faster, whatever the metric."""
    apart: bool | None
    """Whether the two intervals do not touch; None where one is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """What only one of the files has, and no row shows."""

    file: str
    side: str
    load: str | None
    """None: the whole side."""
    metric: str | None
    """None: the whole load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `moe-optimizer compare --json` prints."""

    first: str
    second: str
    different: Mapping[str, tuple[str, str]]
    """Conditions that differ -> what each file says."""
    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...]


def read_measured(path: Path) -> Measured:
    """Read what bench printed with --json, the folder of a bench run, or a record of one.

    Raises:
        InputError: it cannot be read, or has no sides with loads.
    """
    file = path / RESULT_FILE if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise InputError(
            f"{path}: got a folder without {RESULT_FILE}, expected that of a bench run which has ended",
            hint=f"the command of a run that was stopped, with --resume --run-dir {path}, goes on where it was",
        )
    content = read_json(file, max_bytes=_MAX_BYTES)
    try:
        values = {_side_name(side["name"]): dict(_values(side)) for side in content["sides"]}
        environment = {str(key): str(value) for key, value in content["environment"].items()}
        workload = content["workload"]
    except (KeyError, TypeError, AttributeError):
        raise InputError(
            f"{file}: got another kind of JSON, expected what bench prints: sides, environment, workload",
            hint="give what `moe-optimizer bench --json` printed, or the folder of its run",
        ) from None
    described = json.dumps([workload, content.get("description")], sort_keys=True)
    environment |= {"workload": str(workload) if isinstance(workload, str) else described, "described": described}
    if "model" in environment:
        environment["model"] = Path(environment["model"]).name
    return Measured(origin=str(path), environment=environment, values=values)


def compare_results(first: Measured, second: Measured, *, allow_different: bool = False) -> Comparison:
    """Return the sides, loads and metrics that both have, and which only one has.

    Raises:
        InputError: conditions differ and that is not allowed, or they have no load in common.
    """
    different = _different(first.environment, second.environment)
    if different and not allow_different:
        named = "; ".join(f"{key}: {mine!r:.60} and {other!r:.60}" for key, (mine, other) in different.items())
        raise InputError(
            f"{first.origin} and {second.origin} were not measured under the same conditions: {named}",
            hint="--allow-different compares them all the same",
        )
    pairs = _pairs(first, second)
    rows = tuple(_rows(first, second, pairs))
    if not rows:
        raise InputError(f"{first.origin} and {second.origin} have no side and load in common")
    left_out = (*_left_out(first, second, dict(pairs)), *_left_out(second, first, {b: a for a, b in pairs}))
    return Comparison(first=first.origin, second=second.origin, different=different, rows=rows, left_out=left_out)


def _different(mine: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    pairs = {key: (mine.get(key, _UNKNOWN), other.get(key, _UNKNOWN)) for key in _CONDITIONS}
    found = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if "workload" not in found and mine["described"] != other["described"]:
        # A file of the same name with other requests in it.
        found["workload"] = (mine["described"], other["described"])
    return found


def _pairs(first: Measured, second: Measured) -> list[tuple[str, str]]:
    common = [side for side in first.values if side in second.values]
    # Two files without a side of the same name, such as two profiles: in their order.
    return [(side, side) for side in common] or list(zip(first.values, second.values, strict=False))


def _rows(first: Measured, second: Measured, pairs: list[tuple[str, str]]) -> Iterator[Row]:
    for side, partner in pairs:
        for (load, metric), mine in first.values[side].items():
            other = second.values[partner].get((load, metric))
            if other is not None:
                yield _row(load, (side, partner), metric, mine, other)


def _left_out(mine: Measured, other: Measured, partners: Mapping[str, str]) -> Iterator[LeftOut]:
    for side, values in mine.values.items():
        if side not in partners:
            yield LeftOut(file=mine.origin, side=side, load=None, metric=None)
            continue
        theirs = other.values[partners[side]]
        their_loads = {load for load, _ in theirs}
        for load in dict.fromkeys(load for load, _ in values if load not in their_loads):
            yield LeftOut(file=mine.origin, side=side, load=load, metric=None)
        for load, metric in values:
            if load in their_loads and (load, metric) not in theirs:
                yield LeftOut(file=mine.origin, side=side, load=load, metric=metric)


def _row(load: str, sides: tuple[str, str], metric: str, mine: Value, other: Value) -> Row:
    ratio = other.median / mine.median if metric == _HIGHER_IS_BETTER else mine.median / other.median
    apart = None
    if mine.low is not None and mine.high is not None and other.low is not None and other.high is not None:
        apart = mine.high < other.low or other.high < mine.low
    return Row(
        load=load,
        side=sides[0],
        second_side=sides[1],
        metric=metric,
        first=mine,
        second=other,
        ratio=ratio,
        apart=apart,
    )


def _side_name(name: str) -> str:
    return STOCK if name == "stock vLLM" else str(name)


def _values(side: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Value]]:
    for load in side["loads"]:
        name = str(Load(clients=load["clients"], rate=load["rate"]))
        for metric in _METRICS:
            found = load[metric]
            if isinstance(found, Mapping):
                yield (name, metric), Value(median=found["median"], low=found["low"], high=found["high"])
            elif found is not None:
                low, high = load.get(f"{metric}_interval", (None, None))
                yield (name, metric), Value(median=found, low=low, high=high)


def render(found: Comparison) -> str:
    """Return the comparison as text of 80 columns."""
    lines = [f"A: {found.first}", f"B: {found.second}"]
    lines += [f"differs: {key}: {mine:.60} (A), {other:.60} (B)" for key, (mine, other) in found.different.items()]
    others = dict.fromkeys((row.side, row.second_side) for row in found.rows if row.side != row.second_side)
    lines += [f"side: {mine} of A beside {other} of B" for mine, other in others]
    for each in found.left_out:
        file = "A" if each.file == found.first else "B"
        what = ", ".join((each.side, *filter(None, (each.load, _METRICS.get(each.metric or "")))))
        lines.append(f"only in {file}: {what:.70}")
    lines += ["", f"{'load':<14}{'side':<14}{'metric':<10}{'A':>10}{'B':>10}  {'B over A':>9}  intervals"]
    for row in found.rows:
        apart = {None: "-", True: "apart", False: "touch"}[row.apart]
        lines.append(
            f"{row.load:<14.13}{row.side:<14.13}{_METRICS[row.metric]:<10}{_number(row.first):>10}"
            f"{_number(row.second):>10}  {row.ratio:>8.3f}x  {apart}"
        )
    lines += ["", "B over A: above 1, B is faster. Two runs, not made in turns: no verdict."]
    return "\n".join(lines)


def _number(value: Value) -> str:
    return f"{value.median:,.1f}" if value.median >= 100 else f"{value.median:.3g}"
