"""The ledger as text."""

from __future__ import annotations

import dataclasses

from moe_optimizer.measure.tune.ledger import Entry, TuneResult
from moe_optimizer.measure.tune.table import render

NOT_TRIED = Entry(
    step="setting", what="--max-cudagraph-capture-size 128, 256, 512, 1024", against="", kept=False,
    reason="not tried: no time left: it takes 300 s with what must follow, 200 s are left",
)  # fmt: skip
RESULT = TuneResult(
    goal="throughput", metric="output tokens/s", met=True, nearest_miss=None, plan="the plan", plan_file=None,
    plan_digest=None, passes=(), arguments={}, ended="budget", budget_s=600, spent_s=400, environment={},
    entries=(
        Entry(step="plan", what="the plan", against="stock vLLM", kept=True, reason="wins", seconds=100),
        *(Entry(step="ablation", what=name, against="x", kept=True, reason="wins", seconds=90) for name in "ab"),
        NOT_TRIED,
    ),
)  # fmt: skip


def test_the_time_of_each_step_is_shown() -> None:
    shown = " ".join(render(RESULT).split())
    assert "the budget ended it: 400 of 600 s (plan 100 s, ablation 180 s, else 120 s)" in shown


def test_an_interval_that_few_rounds_leave_open_stays_in_its_column() -> None:
    open_ended = Entry(
        step="plan", what="the plan", against="x", kept=False, reason="y", ratio=1e5, low=1e-9, high=1e40
    )
    line = next(
        each for each in render(dataclasses.replace(RESULT, entries=(open_ended,))).splitlines() if "e+" in each
    )
    assert line.index(" no ") < 38
    assert "1e+40" in line


def test_what_was_not_tried_is_shown_in_80_columns() -> None:
    shown = render(RESULT)
    assert max(map(len, shown.splitlines())) <= 80
    assert {"128,", "1024:", "not", "tried:"} <= set(shown.split())
