"""What takes minutes to hours: `scripts/check.sh soak`. They state their claims and keep records with --write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.soak, pytest.mark.timeout(6 * 3600)]


@pytest.mark.parametrize("script", ["configurations", "kills", "killed_launchers", "starts", "mixed_load"])
def test_it_ends_well(script: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "soak" / f"{script}.py")], check=False)
    assert done.returncode == 0
