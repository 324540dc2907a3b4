"""Climbs the rungs, each in a process of its own, which gives all its memory back."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moe_optimizer.measure.ablation.rungs import OPTIMIZATIONS, AblationResult, AblationSettings, Rung
from moe_optimizer.measure.process import MeasurementError, OnStep, run_measurement

_MODULE = "moe_optimizer.measure.ablation.climb"
_GRACE_S = 5.0


@dataclass(slots=True)
class Climb:
    """How far a climb has come: one that was cut off goes on from there."""

    rungs: list[Rung] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    """Of the first rung, which those of the others are compared with."""


def run_ablation(
    settings: AblationSettings,
    *,
    log_folder: Path,
    on_step: OnStep,
    climb: Climb | None = None,
    on_rung: Callable[[], None] = lambda: None,
    limit_s: float | None = None,
) -> AblationResult:
    """Return what was found on each rung that this machine has.

    Args:
        settings: what to climb with.
        log_folder: gets a file of each rung's process.
        on_step: see `OnStep`.
        climb: gets each rung as it is found; those that it has are not climbed again.
        on_rung: called when it has another one.
        limit_s: seconds for all of it.

    Raises:
        MeasurementError: a rung ended without a result, or not in time; or its tokens differ on a CPU, and nothing
            below may change rounding.
        MoeOptimizerError: the engine cannot run the model.
    """
    begun, climb = time.monotonic(), climb or Climb()
    rungs = climb.rungs
    known = {rung.name for rung in rungs}
    for place, each in enumerate(OPTIMIZATIONS):
        if each.name in known or (each.needs_gpu and not settings.on_gpu):
            continue
        on_step(place / len(OPTIMIZATIONS), each.name)
        found = run_measurement(
            _MODULE,
            {"settings": settings, "rung": place},
            on_step=lambda _share, _text: None,
            # Waiting threads would spin on cores that others need.
            environment={"OMP_WAIT_POLICY": "passive", **os.environ},
            log=log_folder / f"{each.name.replace(' ', '_')}.log",
            timeout_s=None if limit_s is None else max(0.0, limit_s - (time.monotonic() - begun)),
            grace_s=_GRACE_S,
        )
        climb.outputs = climb.outputs or found["outputs"]
        equal = _equal(climb.outputs, found["outputs"])
        rung = Rung(
            name=each.name,
            added=each.added,
            rounds=each.rounds,
            tokens_per_s=found["tokens"] / statistics.median(found["seconds"]),
            tokens=found["tokens"],
            seconds=tuple(found["seconds"]),
            peak_bytes=found["peak_bytes"],
            equal=equal,
        )
        rungs.append(rung)
        on_rung()
        # On a GPU a product of another batch size may add in another order, from the first batches on.
        if equal < 1 and not settings.on_gpu and not any(below.rounds for below in rungs):
            raise MeasurementError(f"{each.name}: {1 - equal:.1%} of the tokens differ from the naive loop's")
    climbed = {rung.name for rung in rungs}
    left_out = tuple(each.name for each in OPTIMIZATIONS if each.name not in climbed)
    return AblationResult(settings=settings, rungs=tuple(rungs), left_out=left_out)


def render(result: AblationResult) -> str:
    """Return the rungs as a table, one below the other."""
    lines = [f"{'':22}{'tokens/s':>10}{'x before':>10}{'x naive':>10}{'peak MB':>10}{'equal':>8}"]
    before = naive = result.rungs[0].tokens_per_s
    for rung in result.rungs:
        rate = rung.tokens_per_s
        gains = f"{rate:>10.1f}{rate / before:>10.2f}{rate / naive:>10.2f}"
        lines.append(f"{rung.name:22}{gains}{rung.peak_bytes / 1e6:>10.0f}{rung.equal:>8.1%}")
        before = rate
    lines += [f"{name:22}{'needs a GPU':>12}" for name in result.left_out]
    return "\n".join(lines)


def _equal(want: list[list[int]], got: list[list[int]]) -> float:
    pairs = [pair for ours, theirs in zip(got, want, strict=False) for pair in zip(ours, theirs, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)
