"""The search between servers that are a stand-in: what it answers, and what its ledger says."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optimizer.measure.tune.goal import parse_goal
from moe_optimizer.measure.tune.journal import Journal
from moe_optimizer.measure.tune.ledger import Entry
from moe_optimizer.measure.tune.question import PlannedPass, Question
from moe_optimizer.measure.tune.search import Found, search
from moe_optimizer.measure.tune.settings import Settings
from moe_optimizer.measure.tune.trial import STOCK, Candidate
from tests.unit.measure.tune.paper_measure import PaperMeasure

THROUGHPUT = parse_goal("throughput")
SETTINGS = {"--max-num-seqs": ("", "32", "64"), "--max-num-batched-tokens": ("", "1024", "4096")}


def named(name: str) -> PlannedPass:
    return PlannedPass(name=name)


def found_by(measure: PaperMeasure, *, budget_s: float = 1e6, folder: Path | None = None, **changes: Any) -> Found:
    passes = [*map(named, measure.passes), *(PlannedPass(name=each, is_on=False) for each in measure.offered)]
    fields: dict[str, Any] = {"goal": THROUGHPUT, "passes": passes}
    with mock.patch("time.monotonic", side_effect=lambda: measure.now):
        measure.journal = Journal(folder, budget_s=budget_s)
        found = search(Question(**fields | changes), measure, measure.journal, lambda share, text: None)
        assert measure.journal.spent_s <= budget_s + 1e-6
        assert sum(each.seconds for each in found.entries) == pytest.approx(measure.journal.spent_s)
    return found


def entry(found: Found, step: str, what: str) -> Entry:
    return next(each for each in found.entries if each.step == step and each.what == what)


FACTORS = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.sampled_from([0.6, 0.9, 1.0, 1.1, 1.5]))
WORLDS = st.builds(
    PaperMeasure,
    passes=FACTORS,
    offered=st.dictionaries(st.sampled_from(["x", "y"]), st.sampled_from([0.6, 1.0, 1.5])),
    settings=st.dictionaries(
        st.sampled_from([(flag, value) for flag, values in SETTINGS.items() for value in values[1:]]),
        st.sampled_from([0.5, 1.0, 1.3]),
    ),
    noise=st.sampled_from([0.0001, 0.02, 0.2]),
    # Times that add up without rounding.
    seconds=st.integers(1, 100).map(lambda each: 8.0 * each),
    changing=st.frozensets(st.sampled_from(["a", "b"])),
    wrong=st.frozensets(st.sampled_from(["b", "c", "x"])),
    dead=st.frozensets(st.sampled_from(["d"])),
    illegal=st.frozensets(st.sampled_from([("--max-num-seqs", "32")])),
)


@settings(max_examples=30, deadline=None)
@given(WORLDS, st.integers(1, 16_000))
def test_what_is_not_stock_vllm_was_faster_than_it_and_keeps_the_thresholds_within_the_budget(
    measure: PaperMeasure, budget_s: float
) -> None:
    found = found_by(measure, budget_s=budget_s, settings=SETTINGS, most_trials=6)
    if found.candidate == STOCK:
        return
    won = [each.verdict for each in found.entries if (each.what, each.against) == (_words(found), "stock vLLM")]
    assert set(won) == {"faster"}
    assert not measure.on(found.candidate) & (measure.wrong | measure.dead)
    assert not set(found.candidate.arguments) & measure.illegal


def _words(found: Found) -> str:
    return str(found.candidate)


@settings(max_examples=20, deadline=None)
@given(WORLDS, st.integers(0, 12))
def test_a_search_that_was_stopped_goes_on_to_the_same_ledger(measure: PaperMeasure, stop_after: int) -> None:
    changes: dict[str, Any] = {"settings": SETTINGS, "most_trials": 5, "budget_s": 4000.0}
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as parts:
        straight = found_by(dataclasses.replace(measure, asked=[]), folder=Path(whole), **changes)
        found_by(dataclasses.replace(measure, asked=[], stop_after=stop_after), folder=Path(parts), **changes)
        again = dataclasses.replace(measure, asked=[])
        assert found_by(again, folder=Path(parts), **changes) == straight


def test_a_pass_that_the_requests_cannot_judge_is_not_measured_alone_and_its_line_says_why() -> None:
    passes = [PlannedPass(name="good"), PlannedPass(name="bad", why_unjudged="cannot tell")]
    found = found_by(PaperMeasure(passes={"good": 1.5, "bad": 0.8}), passes=passes)
    assert found.candidate == Candidate()
    line = entry(found, "ablation", "bad")
    assert (line.kept, line.reason, line.verdict) == (True, "cannot tell", None)


def test_the_only_pass_is_judged_by_what_the_plan_gains_over_stock_vllm() -> None:
    world = PaperMeasure(passes={"good": 1.5}, seconds=10.0)
    # It lasts for one pair.
    found = found_by(world, budget_s=12)
    assert [each.partition(" ")[0] for each in world.asked] == ["paired"]
    whole, alone = (entry(found, step, what) for step, what in (("plan", "the plan"), ("ablation", "good")))
    assert (alone.verdict, alone.ratio, alone.against) == ("faster", whole.ratio, "stock vLLM")
    assert (whole.seconds, alone.seconds) == (10.0, 0.0)
    assert found.candidate == Candidate()


def test_what_the_planner_takes_instead_of_a_pass_is_said() -> None:
    found = found_by(PaperMeasure(passes={"a": 0.8, "b": 1.2}, displaced={"kernel": "a"}))
    assert "without it kernel is on" in entry(found, "ablation", "a").reason
    assert "kernel" not in entry(found, "ablation", "b").reason


def test_a_pass_that_harms_is_off_and_one_that_wins_stays() -> None:
    found = found_by(PaperMeasure(passes={"good": 1.5, "bad": 0.8}))
    assert found.candidate == Candidate(off=frozenset({"bad"}))
    assert entry(found, "ablation", "bad").verdict == "slower"
    assert entry(found, "ablation", "good").kept


def test_a_pass_that_the_plan_leaves_off_is_on_where_it_wins() -> None:
    found = found_by(PaperMeasure(passes={"good": 1.5}, offered={"better": 1.3, "worse": 0.8, "idle": 1.0}))
    assert found.candidate == Candidate(on=frozenset({"better"}))
    assert str(found.candidate) == "with better"
    lines = {each.what: (each.verdict, each.kept) for each in found.entries if each.step == "ablation"}
    assert lines["better"] == ("faster", True)
    assert lines["worse"] == ("slower", False)
    assert not lines["idle"][1]


def test_winners_that_exclude_each_other_leave_the_plan_and_it_is_said() -> None:
    offered = {"x": 1.3, "y": 1.2}
    found = found_by(PaperMeasure(passes={"good": 1.5}, offered=offered, apart=frozenset(offered)), settings=SETTINGS)
    assert found.candidate == Candidate()
    assert "exclude" in entry(found, "ablation", "with x, y").reason


def test_a_plan_that_is_stock_vllm_gets_the_pass_that_wins() -> None:
    found = found_by(PaperMeasure(offered={"better": 1.3}), settings=SETTINGS)
    assert found.candidate.on == {"better"}
    assert found_by(PaperMeasure(offered={"worse": 0.9})).candidate == STOCK


def test_a_pass_that_was_left_off_and_whose_answers_are_wrong_stays_off() -> None:
    world = PaperMeasure(passes={"good": 1.5}, offered={"wrong": 2.0}, wrong=frozenset({"wrong"}))
    found = found_by(world)
    assert found.candidate == Candidate()
    assert [each.kept for each in found.entries if each.step == "quality"] == [False]


def test_time_for_a_judgement_is_kept_only_for_what_changes_answers() -> None:
    world = PaperMeasure(passes={"a": 1.5, "b": 1.2}, offered={"x": 1.3}, changing=frozenset("x"))
    found = found_by(world, budget_s=45)
    assert entry(found, "ablation", "b").verdict == "faster"
    assert entry(found, "ablation", "x").reason.startswith("not tried: no time left: it takes 25 s")


def test_without_time_a_pass_that_was_left_off_stays_off_and_is_named() -> None:
    found = found_by(PaperMeasure(passes={"good": 1.5}, offered={"better": 1.3}), budget_s=12)
    assert found.candidate == Candidate()
    assert not entry(found, "ablation", "better").kept


def test_a_pass_that_changes_nothing_is_off() -> None:
    assert found_by(PaperMeasure(passes={"good": 1.5, "idle": 1.0})).candidate.off == {"idle"}


def test_a_plan_without_a_pass_that_wins_is_stock_vllm() -> None:
    assert found_by(PaperMeasure(passes={"bad": 0.8, "idle": 1.0})).candidate == STOCK


def test_a_pass_is_off_together_with_those_that_cannot_run_without_it() -> None:
    passes = [PlannedPass(name="kernel", with_passes=("format",)), PlannedPass(name="format")]
    found = found_by(PaperMeasure(passes={"kernel": 0.7, "format": 1.0, "other": 1.5}), passes=passes)
    assert found.candidate.off == {"kernel", "format"}


def test_settings_that_win_are_kept_and_marked() -> None:
    measure = PaperMeasure(passes={"good": 1.5}, settings={("--max-num-seqs", "64"): 1.3})
    found = found_by(measure, settings=SETTINGS)
    assert dict(found.candidate.arguments)["--max-num-seqs"] == "64"
    assert entry(found, "setting", str(found.candidate)).kept


def test_hopeless_settings_end_early() -> None:
    measure = PaperMeasure(settings={("--max-num-seqs", "32"): 0.2})
    found = found_by(measure, settings={"--max-num-seqs": ("", "64", "128", "256", "32")})
    assert "hopeless" in entry(found, "setting", "--max-num-seqs 32").reason


def test_settings_that_cannot_be_planned_cost_nothing() -> None:
    measure = PaperMeasure(illegal=frozenset({("--max-num-seqs", "32")}))
    found = found_by(measure, settings={"--max-num-seqs": ("", "32")})
    assert entry(found, "setting", "--max-num-seqs 32").seconds == 0
    assert not any("32" in each for each in measure.asked)


def test_a_winner_with_wrong_answers_is_rejected_and_the_rest_of_it_kept() -> None:
    found = found_by(PaperMeasure(passes={"wrong": 2.0, "good": 1.5}, wrong=frozenset({"wrong"})))
    assert found.candidate == Candidate(off=frozenset({"wrong"}))
    assert [each.kept for each in found.entries if each.step == "quality"] == [False]


@pytest.mark.parametrize(("known", "off"), [(("format",), {"kernel", "format"}), ((), None)])
def test_the_pass_at_fault_is_off_with_those_that_need_it_where_there_is_such_a_plan(
    known: tuple[str, ...], off: set[str] | None
) -> None:
    passes = [PlannedPass(name="kernel", with_passes=known), *map(named, ("format", "good"))]
    factors = {"kernel": 1.5, "format": 1.3, "good": 1.2}
    world = PaperMeasure(passes=factors, wrong=frozenset({"kernel"}), needs={"format": "kernel"})
    expected = STOCK if off is None else Candidate(off=frozenset(off))
    assert found_by(world, passes=passes).candidate == expected


def test_a_server_that_dies_leaves_stock_vllm() -> None:
    found = found_by(PaperMeasure(passes={"deadly": 2.0}, dead=frozenset({"deadly"})))
    assert found.candidate == STOCK
    assert "ended" in entry(found, "plan", "the plan").reason


def test_servers_that_never_start_are_given_up_soon_and_said() -> None:
    world = PaperMeasure(passes={"a": 1.2}, all_dead=True)
    found = found_by(world, settings=SETTINGS)
    assert found.candidate == STOCK
    assert found.why_nothing
    assert len(world.asked) < 6
    assert not found_by(PaperMeasure(passes={"a": 1.2}), settings=SETTINGS).why_nothing


def test_without_time_for_a_second_measurement_the_first_verdict_decides() -> None:
    found = found_by(PaperMeasure(passes={"good": 1.5, "more": 1.2}), budget_s=12)
    assert (found.candidate, found.ended) == (Candidate(), "budget")
    assert not any(each.verdict for each in found.entries if each.step == "ablation")


def test_a_measurement_for_which_the_budget_did_not_last_is_in_the_ledger() -> None:
    found = found_by(PaperMeasure(passes={"good": 1.5}), budget_s=5)
    assert (found.candidate, found.ended) == (STOCK, "budget")
    assert [(each.step, each.what) for each in found.entries] == [
        ("unfinished", "the plan against stock vLLM"), ("ablation", "good"),
    ]  # fmt: skip


@pytest.mark.parametrize("budget_s", [5, 12, 45, 55])
def test_what_there_was_no_time_for_is_named(budget_s: float) -> None:
    found = found_by(PaperMeasure(passes={"good": 1.5, "more": 1.2}), budget_s=budget_s, settings=SETTINGS)
    assert {each.what for each in found.entries if each.step == "ablation"} == {"good", "more"}
    shown = " ".join(each.what for each in found.entries if each.step == "setting")
    assert all(value in shown for values in SETTINGS.values() for value in values)
    assert any(each.reason.startswith("not tried: no time left") for each in found.entries if each.step == "setting")


def test_settings_that_an_interrupt_left_out_are_named() -> None:
    found = found_by(PaperMeasure(passes={"good": 1.5}, stop_after=1), settings=SETTINGS)
    assert entry(found, "setting", "--max-num-batched-tokens 1024, 4096").reason == "not tried: interrupted"


def test_a_plan_that_cannot_be_measured_leaves_its_passes_unmeasured_by_name() -> None:
    found = found_by(PaperMeasure(passes={"deadly": 2.0, "good": 1.5}, dead=frozenset({"deadly"})))
    assert "could not be measured" in entry(found, "ablation", "good").reason


def test_settings_have_their_turn_before_every_pass_is_measured_alone() -> None:
    passes = {f"pass {number}": 1.1 for number in range(20)}

    def measured(step: str, tried: Settings) -> int:
        found = found_by(PaperMeasure(passes=passes), budget_s=200, settings=tried)
        return sum(each.step == step and each.score is not None for each in found.entries)

    assert (measured("ablation", SETTINGS), measured("ablation", {})) == (15, 18)
    assert measured("setting", SETTINGS) > 0


def test_an_interrupt_keeps_what_was_found() -> None:
    found = found_by(PaperMeasure(passes={"good": 1.5}, stop_after=2), settings=SETTINGS)
    assert (found.ended, found.candidate) == ("interrupted", Candidate())


def test_limits_that_nothing_keeps_have_a_nearest_miss() -> None:
    # Scores of limits are better when they are lower: the pass halves a time that is 100 times too long.
    found = found_by(PaperMeasure(passes={"good": 0.5}), goal=parse_goal("ttft<1ms"))
    assert not found.met
    assert found.nearest_miss is not None
    assert 49 < found.nearest_miss.score < 51
    assert found.candidate == Candidate()


def test_limits_that_are_kept_are_met() -> None:
    found = found_by(PaperMeasure(passes={"good": 0.005}), goal=parse_goal("ttft<1ms"))
    assert (found.met, found.nearest_miss) == (True, None)


def test_a_measurement_that_two_lines_of_the_ledger_rest_on_takes_its_time_once() -> None:
    found = found_by(PaperMeasure(passes={"a": 1.5}, changing=frozenset("a"), seconds=10.0))
    against_stock = [(each.step, each.seconds) for each in found.entries if each.against == "stock vLLM"]
    assert against_stock == [("plan", 10.0), ("ablation", 0.0), ("result", 0.0)]


def test_a_measurement_that_was_cut_off_takes_its_time_in_the_ledger() -> None:
    found = found_by(PaperMeasure(passes={"good": 1.5}), budget_s=5)
    assert [each.seconds for each in found.entries if each.step == "unfinished"] == [5.0]


@pytest.mark.parametrize("goal", ["throughput", "ttft<1ms"])
@pytest.mark.parametrize(("budget_s", "stop_after"), [(5, None), (500, 0)])
def test_where_no_comparison_ended_the_goal_is_not_met(goal: str, budget_s: float, stop_after: int | None) -> None:
    measure = PaperMeasure(passes={"good": 1.5}, stop_after=stop_after)
    found = found_by(measure, goal=parse_goal(goal), budget_s=budget_s)
    assert (found.met, found.compared, found.candidate) == (False, False, STOCK)


def test_a_plan_that_lost_was_compared_and_stock_vllm_meets_a_goal_without_limits() -> None:
    found = found_by(PaperMeasure(passes={"bad": 0.8}))
    assert (found.met, found.compared, found.candidate) == (True, True, STOCK)
