"""What goes wrong in the plugin never breaks vLLM, and never goes unseen.

A kernel that falls back: test_bf16_equals_stock.py. A process that is killed: test_flag_passes.py, and
test_disaggregation.py in the middle of an answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_optimizer.errors import ExitCode, RequiredNotAppliedError
from moe_optimizer.proof.verdict import model_holders
from tests.run_processes import processes_of
from tests.served_until import serve
from tests.vllm.conftest import READY_TIMEOUT_S, Served, tiny_plan


def test_a_required_pass_that_cannot_run_ends_the_start_with_exit_code_6(
    broken_kernel: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in broken_kernel.items():
        monkeypatch.setenv(name, value)
    plan = tiny_plan("--enforce-eager", required=("flash_dmoe",))
    with pytest.raises(RequiredNotAppliedError, match="injected") as caught:
        serve(plan, run_dir=tmp_path / "run", ready_timeout_s=READY_TIMEOUT_S)
    assert caught.value.exit_code is ExitCode.NOT_APPLIED
    assert processes_of(tmp_path / "run") == []


def test_plain_vllm_with_a_profile_plans_by_itself_and_names_what_only_flags_could_do(
    plain_tensor_parallel: Served,
) -> None:
    assert (plain_tensor_parallel.run_dir / "plan.json").is_file()
    assert plain_tensor_parallel.run_dir.stat().st_mode & 0o777 == 0o700
    workers = model_holders(plain_tensor_parallel.proofs)
    assert len({worker.plan_digest for worker in workers} - {""}) == 1
    for worker in workers:
        assert "needs --max-num-seqs" in worker.passes["scheduler"].why_not


def test_a_wrong_profile_stops_each_process_of_plain_vllm_where_it_loads_its_plugins() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from vllm.plugins import load_general_plugins; load_general_plugins()"],
        env={**os.environ, "MOE_OPTIMIZER_PROFILE": "balancd"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "balancd" in done.stderr
