"""Which vLLM `make setup` installs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from moe_optimizer.inspection.vllm_runs import read_vllm_runs

SETUP = Path(__file__).parents[3] / "scripts" / "setup.sh"
NEWEST = read_vllm_runs().versions("cuda")[0]


def setup(device: str, version: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"VLLM_VERSION": version}
    command = ["bash", str(SETUP), "--device", device, "--dry-run"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_gpus_get_the_newest_version_of_the_table() -> None:
    done = setup("cuda")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"vllm=={NEWEST}\n", "")


def test_a_build_of_a_version_of_the_table_is_taken_without_a_warning() -> None:
    done = setup("cuda", f"{NEWEST}+cu129")
    assert (done.stdout, done.stderr) == (f"vllm=={NEWEST}+cu129\n", "")


def test_another_version_is_taken_with_a_warning() -> None:
    done = setup("cuda", "99.1.0")
    assert (done.returncode, done.stdout) == (0, "vllm==99.1.0\n")
    assert re.search("warning: .*vLLM 99\\.1\\.0", done.stderr)
    assert NEWEST in done.stderr


@pytest.mark.parametrize(("device", "version"), [("cuda", "newest"), ("cuda", "0.26.0; id"), ("cpu", "99.1.0")])
def test_a_version_that_cannot_be_had_is_refused(device: str, version: str) -> None:
    done = setup(device, version)
    assert (done.returncode, done.stdout) == (3, "")
    assert f"VLLM_VERSION: got '{version}'" in done.stderr
