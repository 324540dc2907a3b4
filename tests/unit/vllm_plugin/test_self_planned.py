"""What a vLLM that plans for itself says of a plan that does not give what was asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError, RequiredNotAppliedError
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.plan import Plan
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.builders import cpu_machine, made_plan, profile_with, tiny_moe

NEEDS = "needs expert parallelism (--enable-expert-parallel); without it every process has a slice of every expert"


def plan_of(**passes: dict[str, Any]) -> Callable[[Any], Plan]:
    return lambda _facts: made_plan(tiny_moe(), cpu_machine(), profile_with(passes=passes))


def resolved(tmp_path: Path, planner: Callable[[Any], Plan]) -> PluginSession:
    session = PluginSession(run_dir=tmp_path, make_plan=planner)
    session.resolve_plan(lambda: None)  # pyrefly: ignore[bad-argument-type] - these planners ask for no facts
    return session


def test_a_refused_wish_is_in_the_proof_and_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = resolved(tmp_path, plan_of(expert_placement={"mode": "on"}))
    entry = session.proof.passes["expert_placement"]
    assert (entry.requested, entry.applied, entry.why_not) == (Wish.ON.value, False, f"refused: {NEEDS}")
    assert caplog.text.count(f"(profile balanced): {NEEDS}") == 1


def test_the_log_says_in_one_line_what_is_applied_and_where_the_proofs_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "moe_optimizer")
    resolved(tmp_path, plan_of())
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert re.fullmatch(f"profile balanced: expert_load.*{tmp_path}", line)


def test_what_was_only_auto_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = resolved(tmp_path, plan_of(expert_placement={"mode": "auto"}))
    assert "expert_placement" not in session.proof.passes
    assert "expert_placement" not in caplog.text


def test_warnings_of_the_plan_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolved(tmp_path, plan_of(fp8={"mode": "on", "linears": "on"}))
    assert "fp8.linears (profile balanced): " in caplog.text


def test_a_plan_that_cannot_be_made_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def failing(_facts: Any) -> Plan:
        raise InputError("s.json: broken")

    session = resolved(tmp_path, failing)
    assert session.plan is None
    assert ": InputError: s.json: broken" in session.proof.passes["flash_dmoe"].why_not
    assert "InputError: s.json: broken" in caplog.text


def test_a_server_without_a_required_pass_does_not_come_up(tmp_path: Path) -> None:
    with pytest.raises(RequiredNotAppliedError, match="expert_placement is required"):
        resolved(tmp_path, plan_of(expert_placement={"mode": "on", "required": True}))
