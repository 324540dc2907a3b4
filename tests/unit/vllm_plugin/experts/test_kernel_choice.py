"""When our class for CPUs is offered to vLLM."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.vllm_plugin.experts import kernel_choice
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession
from tests.builders import OURS, cpu_machine, made_plan, tiny_moe


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Asks whether the class is offered in a worker, by the threads of the plan's measurement and its own."""
    monkeypatch.setattr(kernel_choice, "why_adapters_keep_vllms", lambda: "")
    monkeypatch.setattr(kernel_choice, "world", lambda: (0, 1))

    def ask(planned: int | None, here: int) -> tuple[bool, str]:
        monkeypatch.setattr(kernel_choice, "cpu_threads", lambda: here)
        plan = made_plan(tiny_moe(), cpu_machine(), wishes=OURS)
        params = FlashDmoeParams(kernel="cpu", threads=planned)
        decisions = tuple(
            dataclasses.replace(each, params=params) if each.pass_name == EXPERTS_PASS else each
            for each in plan.decisions
        )
        session = PluginSession(run_dir=tmp_path, plan=plan.replace(decisions=decisions))
        classes = kernel_choice.offered_classes(session, lambda: type("Ours", (), {}), ())
        return bool(classes), session.proof.passes[EXPERTS_PASS].why_not

    return ask


def test_a_kernel_that_was_measured_with_other_threads_is_not_offered(offered: Any) -> None:
    assert offered(2, 2) == (True, "")
    is_offered, why_not = offered(2, 1)
    assert not is_offered
    assert re.search("2 threads,.* 1$", why_not)


def test_a_kernel_that_is_needed_or_asked_for_is_offered_with_any_threads(offered: Any) -> None:
    assert offered(None, 1) == (True, "")
