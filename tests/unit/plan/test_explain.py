from __future__ import annotations

import dataclasses
import re
import shlex

import pytest

from moe_optimizer.passes.registry import PASS_NAMES, resolve_wishes
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.explain import render_plan
from moe_optimizer.plan.plan import Plan
from tests.builders import OURS, cpu_machine, gpus, made_plan, mixtral_8x7b, qwen3_30b_a3b, tiny_moe


@pytest.fixture(scope="module")
def cpu_plan() -> Plan:
    return made_plan(tiny_moe(), cpu_machine(), wishes=OURS)


def section(text: str, title: str) -> str:
    return text.partition(f"\n{title}\n")[2].partition("\n\n")[0]


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_keep_to_the_width_unless_a_single_word_is_longer(plan, width, explain):
    for line in render_plan(plan, width=width, explain=explain).splitlines():
        assert len(line) <= width or len(line.split()) <= 2, line


def test_the_text_is_ascii_without_colours_and_coloured_when_asked(plan):
    plain, colored = render_plan(plan), render_plan(plan, color=True)
    assert plain.isascii()
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[\d+m", "", colored) == plain


def test_every_pass_is_in_the_table(plan):
    table = section(render_plan(plan), "Decisions")
    for name in PASS_NAMES:
        assert re.search(rf"^  {name} +(auto|on|off) +(on|off|refused) ", table, re.MULTILINE), name


def test_the_command_is_the_exact_argument_list(cpu_plan):
    words = shlex.split(section(render_plan(cpu_plan), "Command").replace("\\\n", " "))
    environment = [f"{key}={value}" for key, value in cpu_plan.serve_env.items()]
    plan_file = "MOE_OPTIMIZER_PLAN=RUN_DIR/plan.json"
    assert words == [plan_file, *environment, "vllm", "serve", cpu_plan.model.path, *cpu_plan.serve_args.words]


def test_the_plugin_gets_no_plan_where_it_has_nothing_to_apply(plan):
    assert "MOE_OPTIMIZER_PLAN" in render_plan(plan)
    only_flags = resolve_wishes((), ("expert-load",))
    bare = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 2), "aggressive", wishes=only_flags)
    assert "MOE_OPTIMIZER_PLAN" not in render_plan(bare)


def test_on_the_cpu_the_command_that_really_starts_the_server_is_named(cpu_plan, plan):
    assert "vllm.entrypoints.openai.api_server" in render_plan(cpu_plan)
    assert "vllm.entrypoints.openai.api_server" not in render_plan(plan)


def test_the_difference_names_flags_environment_and_plugin(cpu_plan):
    lines = section(render_plan(cpu_plan), "Against plain vLLM on the same devices").splitlines()
    assert "  + --max-num-seqs 256" in lines
    assert "  + VLLM_CPU_KVCACHE_SPACE=1" in lines
    assert any(line.startswith("  + plugin: flash_dmoe ") for line in lines)
    assert not any("--port" in line for line in lines)


def test_memory_bars_add_up_to_the_device(plan):
    text = section(render_plan(plan), "Memory of each GPU")
    shares = [float(share) for share in re.findall(r"([\d.]+)%", text)]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_a_gain_shows_its_source(plan):
    text = " ".join(render_plan(plan).split())
    assert re.search(r"expected gain: 2\.00x[^:]*\(modelled:", text)


def test_where_no_gain_is_modelled_of_a_pass_that_is_on_the_explanation_says_why(plan):
    claimed = render_plan(plan, explain=True).count("expected gain: ")
    none = render_plan(plan, explain=True).count("expected gain: none is modelled: ")
    on = [decision for decision in plan.decisions if decision.status is Status.ON]
    assert claimed == len(on)
    assert none == sum(decision.gain is None for decision in on) > 0


def test_the_gain_of_a_pass_that_is_off_is_not_claimed(plan):
    without = tuple(
        dataclasses.replace(each, status=Status.OFF) if each.pass_name == "kv_cache" else each
        for each in plan.decisions
    )
    text = " ".join(render_plan(plan.replace(decisions=without)).split())
    assert re.search(r"could bring: 2\.00x[^:]*\(modelled:", text)
    assert "expected gain: 2.00x" not in text


def test_an_argument_that_is_too_long_has_its_value_below_it(plan):
    lines = render_plan(plan, width=80).splitlines()
    at = lines.index("    --quantization-config \\")
    assert lines[at + 1].startswith('      \'{"linear":')
    assert "  + --quantization-config" in lines


def test_explain_adds_who_asked_evidence_rejected_and_limits(plan):
    text = " ".join(render_plan(plan, explain=True).split())
    assert " profile aggressive" in text
    assert "rejected: tp" in text
    assert "limits: activation memory" in text
    assert "asked by" not in render_plan(plan)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("asked", [{"clients": 256}, {"clients": 2000}, {"clients": 64, "layout": "tp1p1d3"}])
def test_of_each_layout_everything_that_is_predicted_is_shown_and_why_not_to_the_last_word(width, asked):
    plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 4), **asked)
    assert plan.layouts is not None
    words = " ".join(section(render_plan(plan, width=width), "Layout").split())
    for each in plan.layouts.estimates:
        figures = f"{each.tpot_ms:.2f} {each.ttft_ms:.0f} {each.tokens_per_s:,.0f} {each.weight_bytes / 1e9:.1f}"
        row = words.partition(f"{each.layout} {figures} ")[2]
        assert re.match(rf"(#+\.* )?{re.escape(each.why_not or 'planned')}(;| |$)", row), (each, words)


@pytest.mark.parametrize(("hardware", "waits"), [("h100_sxm", True), ("h200", False)])
def test_of_the_planned_layout_it_is_said_whether_requests_wait_for_room(hardware, waits):
    plan = made_plan(qwen3_30b_a3b(), gpus(hardware, 1), clients=256)
    assert plan.layouts is not None
    planned = plan.layouts.estimate
    assert bool(planned.waiting) is waits
    words = " ".join(section(render_plan(plan), "Layout").split())
    assert (f"{planned.waiting} of {planned.waiting + planned.running} requests wait" in words) is waits


def test_warnings_are_shown():
    plan = made_plan(mixtral_8x7b(), gpus("h100_sxm", 2), num_gpus=9)
    assert f"- {plan.warnings[0]}" in " ".join(render_plan(plan).split())
    assert "--gpus 9:" in plan.warnings[0]


def test_terminal_escapes_in_a_model_name_are_neutralised():
    plan = made_plan(tiny_moe(name="evil\x1b[31m"), cpu_machine())
    assert "\x1b" not in render_plan(plan)
