"""What goes wrong in the plugin never breaks vLLM, and never goes unseen.

A kernel that falls back: test_bf16_equals_stock.py. A wrong kernel: test_measured.py. A process
that is killed: test_flag_passes.py, and test_disaggregation.py in the middle of an answer.
"""

from __future__ import annotations

import os
import subprocess
import sys

from moe_optimizer.proof.verdict import model_holders
from tests.vllm.conftest import Served


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
