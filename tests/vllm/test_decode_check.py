"""A server whose kernel is wrong only at few tokens, and right whenever it is checked by itself, is never ready.

A start of its own: what is shown is that there is no server to ask.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from moe_optimizer.errors import ExitCode, RequiredNotAppliedError
from moe_optimizer.launcher.launch import running
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.proof.record import read_proofs
from tests.run_processes import processes_of
from tests.vllm import wrong_kernels
from tests.vllm.conftest import FORKED, READY_TIMEOUT_S, plan_here


def test_a_kernel_that_is_wrong_only_when_decoding_ends_the_start(tmp_path: Path) -> None:
    site, switch = tmp_path / "site", tmp_path / "mistake"
    site.mkdir()
    switch.write_text("decode: other experts")
    shutil.copy(wrong_kernels.__file__, site)
    forked = (FORKED / "sitecustomize.py").read_text()  # Python reads one file of this name
    (site / "sitecustomize.py").write_text(f"{forked}\nimport wrong_kernels\n")
    plan = plan_here("--enforce-eager", dtype="bfloat16", wishes=resolve_wishes(("flash-dmoe",), ()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
        patch.setenv("MOE_TEST_FAULT_FILE", str(switch))
        run = running(plan, run_dir=tmp_path / "run", ready_timeout_s=READY_TIMEOUT_S, decode_check_s=600.0)
        with pytest.raises(RequiredNotAppliedError, match=r"decode check: server: \d requests at once") as caught, run:
            pass
    assert caught.value.exit_code is ExitCode.NOT_APPLIED
    assert processes_of(tmp_path / "run") == []
    (canary,) = {proof.passes["flash_dmoe"].canary for proof in read_proofs(tmp_path / "run") if proof.role == "worker"}
    assert canary.startswith("passed before ready"), "the canary must not see it"
