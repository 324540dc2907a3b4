"""What goes wrong in the plugin never breaks vLLM, and never goes unseen."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_optimizer.errors import RequiredNotAppliedError, ServerFailedError
from moe_optimizer.launcher.launch import ServerInfo, running, serve
from moe_optimizer.proof.record import read_proofs
from moe_optimizer.proof.verdict import kernels_in_use
from tests.eventually import eventually
from tests.run_processes import processes_of
from tests.vllm.conftest import READY_TIMEOUT_S, Served, ask, plain_server, tiny_plan

pytestmark = pytest.mark.vllm

# Stands in for the op's module in every process of the server, before anybody imports the real one.
BROKEN_KERNEL = """
import sys, types
broken = types.ModuleType("moe_optimizer.ops.fused_experts")
def fused_experts(*args, **kwargs):
    raise RuntimeError("injected")
broken.fused_experts = fused_experts
broken.why_reference = lambda *args: None
sys.modules[broken.__name__] = broken
"""


def test_a_broken_kernel_falls_back_to_stock(
    stock_fp32: Served, injected: Callable[[str], None], tmp_path: Path
) -> None:
    injected(BROKEN_KERNEL)
    plan = tiny_plan("--enforce-eager")
    with running(plan, run_dir=tmp_path / "run", ready_timeout_s=READY_TIMEOUT_S) as info:
        answers = ask(info.base_url)
        (row,) = [row for row in info.rows if row.pass_name == "flash_dmoe"]
    assert (row.applied, row.ran) == ("no", "no")
    assert row.why_not == "fallback: kernel self-test failed: RuntimeError: injected"
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in stock_fp32.answers]


def test_a_required_pass_that_cannot_run_ends_the_start_with_exit_code_6(
    injected: Callable[[str], None], tmp_path: Path
) -> None:
    injected(BROKEN_KERNEL)
    plan = tiny_plan("--enforce-eager", required=("flash_dmoe",))
    with pytest.raises(RequiredNotAppliedError, match="RuntimeError: injected") as caught:
        serve(plan, run_dir=tmp_path / "run", ready_timeout_s=READY_TIMEOUT_S)
    assert caught.value.exit_code == 6
    assert processes_of(tmp_path / "run") == []


def test_a_killed_engine_ends_with_exit_code_7_and_leaves_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def kill_engine(info: ServerInfo) -> None:
        (engine,) = [proof.pid for proof in info.proofs if proof.role == "engine"]
        os.kill(engine, signal.SIGKILL)

    with pytest.raises(ServerFailedError, match=r"server ended while serving|server hangs") as caught:
        serve(tiny_plan("--enforce-eager"), run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S, on_ready=kill_engine)
    assert caught.value.exit_code == 7
    assert processes_of(run_dir) == []


def test_plain_vllm_with_a_profile_plans_and_applies_by_itself(stock_fp32: Served, tmp_path: Path) -> None:
    environment = {"MOE_OPTIMIZER_PROFILE": "balanced", "MOE_OPTIMIZER_RUN_DIR": str(tmp_path)}
    arguments = ("--dtype", "float32", "--enforce-eager", "--logprobs-mode", "raw_logits")
    with plain_server(*arguments, **environment) as url:
        answers = ask(url)
        # Nobody has waited for them as the launcher does, and a process that is ended writes no more.
        eventually(lambda: kernels_in_use(read_proofs(tmp_path)), "our kernel did not run")
    proofs = read_proofs(tmp_path)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in stock_fp32.answers]
    (worker,) = [proof for proof in proofs if proof.role == "worker"]
    assert worker.plan_digest
    assert (tmp_path / "plan.json").is_file()
    # What only flags could do is named with the flags.
    assert worker.passes["scheduler"].why_not.startswith("not applied: needs --max-num-seqs")


def test_a_wrong_profile_stops_plain_vllm_with_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(AssertionError, match="the server ended"),
        plain_server("--enforce-eager", MOE_OPTIMIZER_PROFILE="balancd"),
    ):
        pass
    assert "balancd" in capfd.readouterr().err
