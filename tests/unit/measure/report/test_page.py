"""The page: every section filled or naming the command that fills it, nothing from outside, nothing unescaped."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from moe_optimizer.measure.bench.api_servers import ApiServers
from moe_optimizer.measure.report.inputs import Inputs
from moe_optimizer.measure.report.page import render_page
from moe_optimizer.measure.tune.ledger import NearestMiss
from tests.builders.quality import failure, quality_result
from tests.builders.reports import full_inputs
from tests.builders.results import bench_result

SECTIONS = (
    "asked",
    "speed",
    "latency",
    "plan",
    "tuning",
    "proof",
    "experts",
    "roofline",
    "step",
    "quality",
    "environment",
    "again",
)
HOW_TO = {
    "speed": "moe-optimizer bench",
    "latency": "moe-optimizer bench",
    "plan": "moe-optimizer plan",
    "tuning": "moe-optimizer tune",
    "proof": "moe-optimizer serve",
    "experts": "--enable-expert-load",
    "roofline": "moe-optimizer measure speeds",
    "step": "moe-optimizer measure step",
}


class Reader(HTMLParser):
    """Collects elements, with the section that each is in."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.section = ""
        self.elements: list[tuple[str, str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
        self.elements.append((self.section, tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((self.section, tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


@pytest.fixture(scope="module")
def page() -> str:
    return render_page(full_inputs())


def section(page: str, name: str) -> str:
    found = re.search(rf'<section id="{name}">(.*?)</section>', page, re.DOTALL)
    assert found, name
    return found[1]


def test_every_section_is_filled_where_there_is_something_to_show(page: str):
    assert all('class="absent"' not in section(page, name) for name in SECTIONS)


def test_the_measured_gain_of_a_pass_stands_beside_the_expected_one(page: str):
    rows = re.findall(r"<tr.*?</tr>", section(page, "tuning"))
    assert any({"flash_dmoe", "1.080x"} <= set(re.findall(r">([^<>]+)<", row)) and "1.12x" in row for row in rows)
    assert any("scheduler" in row and "none modelled: the model is of one step" in row for row in rows)


def test_the_memory_that_was_found_stands_beside_the_planned_one(page: str):
    rows = [re.findall(r">([^<>]+)<", row) for row in re.findall(r"<tr>.*?</tr>", section(page, "plan"))]
    assert ["weights", "61.1 GB", "61.2 GB"] in rows
    found = {row[0]: row[-1] for row in rows if len(row) == 3}
    assert found.items() >= {"cache": "9.66 GB", "activations": "2.15 GB", "workspace": "944 MB"}.items()


@pytest.mark.parametrize("name", HOW_TO)
def test_an_empty_section_names_the_command_that_fills_it(name: str):
    assert HOW_TO[name] in section(render_page(Inputs(quality=quality_result())), name)


def test_a_report_without_quality_says_how_to_judge_it():
    assert "moe-optimizer quality" in section(render_page(dataclasses.replace(full_inputs(), quality=None)), "quality")


@pytest.mark.parametrize(
    ("name", "pictures"), [("speed", 3), ("latency", 4), ("experts", 1), ("roofline", 4), ("step", 4)]
)
def test_every_plot_is_there(page: str, name: str, pictures: int):
    assert section(page, name).count("<svg") == pictures


def test_elements_are_closed_and_ids_are_unique(page: str):
    reader = Reader(page)
    assert reader.open == []
    ids = [attrs["id"] for _, _, attrs in reader.elements if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_every_picture_and_table_says_what_it_is(page: str):
    tags = [tag for _, tag, _ in Reader(page).elements]
    assert tags.count("table") == tags.count("caption") > 8
    assert tags.count("desc") == tags.count("svg") > 8
    for _, tag, attrs in Reader(page).elements:
        if tag == "svg":
            assert attrs["role"] == "img"
            assert all(f'id="{name}"' in page for name in (attrs["aria-labelledby"] or "").split())


def test_nothing_comes_from_outside_and_there_is_no_script(page: str):
    for _, tag, attrs in Reader(page).elements:
        assert tag not in ("script", "iframe", "img", "object")
        assert (attrs.get("href") or "#").startswith(("#", "data:"))
        assert not any(name.startswith("on") for name in attrs)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", page)


def test_text_of_a_result_is_never_markup():
    bench = bench_result(description="<script>alert(1)</script>", command=("moe-optimizer", "bench", "<b>'x'</b>"))
    shown = render_page(Inputs(bench=bench))
    assert "<script" not in shown
    assert "<b>" not in shown


def test_the_command_can_be_pasted_into_a_shell():
    bench = bench_result(command=("moe-optimizer", "bench", "a model", "--profile", "balanced"))
    assert "moe-optimizer bench &#39;a model&#39; --profile balanced" in render_page(Inputs(bench=bench))


def test_a_tuning_shows_how_it_ended_what_it_missed_and_its_command():
    tuning = full_inputs().tuning
    assert tuning is not None
    miss = NearestMiss(what="without <fp8>", score=1.25, figures={"ttft_p99_ms": 250.0})
    command = ("moe-optimizer", "tune", "a model", "--goal", "ttft<200ms")
    missed = dataclasses.replace(tuning, met=False, nearest_miss=miss, ended="budget", command=command)
    page = render_page(Inputs(tuning=missed))
    shown = section(page, "tuning")
    assert "1,100 of 1,200 s" in shown
    assert "without &lt;fp8&gt;, 1.25 times" in shown
    assert "ttft_p99_ms 250" in shown
    assert "tune &#39;a model&#39; --goal &#39;ttft&lt;200ms&#39;" in section(page, "again")
    assert "times the limit" not in section(render_page(Inputs(tuning=tuning)), "tuning")


def test_verdicts_stand_first(page: str):
    assert page.index('class="verdicts"') < page.index('id="asked"')
    assert "faster" in section(page, "speed")


def test_a_threshold_that_is_not_kept_stands_with_the_pass_at_fault():
    failed = quality_result(failed=(failure(pass_name="fp8", where="mmlu acc", metric="task_drop", value=0.05),))
    shown = section(render_page(Inputs(quality=failed)), "quality")
    assert "not within every threshold" in shown
    assert "<strong>fp8</strong>: task_drop 0.05 (mmlu acc)" in shown


def test_a_judgement_of_random_weights_is_said_to_say_little(page: str):
    assert "random weights" not in section(page, "quality")
    assert "random weights" in section(render_page(Inputs(quality=quality_result(flat=True))), "quality")


def test_tasks_and_the_users_prompts_stand_in_the_quality_section(page: str):
    shown = section(page, "quality")
    assert "-0.005 (-0.02 to 0.01)" in shown
    assert "one t<mark>o</mark>o" in shown
    assert "one t<mark>o</mark>w" in shown


def test_only_processes_that_hold_the_model_are_asked_for_proof():
    inputs = full_inputs()
    (run,) = inputs.runs
    frontend = dataclasses.replace(run.proofs[0], role="frontend", pid=99, model_rank=-1, world_size=0)
    page = render_page(dataclasses.replace(inputs, runs=(dataclasses.replace(run, proofs=(frontend, *run.proofs)),)))
    assert "worker 0, process 4321" in section(page, "proof")
    assert "process 99" not in page


def test_a_run_is_called_as_its_side_and_stock_vllm_has_no_plan():
    inputs = full_inputs()
    (run,) = inputs.runs
    assert inputs.bench is not None
    for number, shown in ((0, "<h3>balanced"), (1, "moe-optimizer plan")):
        sides = list(inputs.bench.sides)
        sides[number] = dataclasses.replace(sides[number], plan_digest=run.plan.digest)
        bench = dataclasses.replace(inputs.bench, sides=tuple(sides))
        assert shown in section(render_page(dataclasses.replace(inputs, bench=bench)), "plan")


def test_what_api_servers_took_has_columns_where_it_is_known():
    known = bench_result()
    side = known.sides[0]
    use = ApiServers(processes=1, us_per_token=52.25, core_share=0.744)
    loads = (side.loads[0], dataclasses.replace(side.loads[1], api_servers=use))
    known = dataclasses.replace(known, sides=(dataclasses.replace(side, loads=loads), *known.sides[1:]))
    shown, silent = (section(render_page(Inputs(bench=each)), "speed") for each in (known, bench_result()))
    assert "<td>52.25</td><td>0.744</td></tr>" in shown
    assert shown.count("<td>-</td><td>-</td></tr>") == 3
    assert "API server" not in silent
