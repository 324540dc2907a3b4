"""Scripts that write files of the repository do so only when asked in words they know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.mark.parametrize("name", ["update_class_defaults", "write_kernel_speeds", "write_schemas"])
@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--halp", 2)])
def test_help_is_shown_and_an_unknown_option_refused(name: str, argument: str, status: int) -> None:
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status
    assert (done.stderr if status else done.stdout).startswith(f"usage: {name}.py")
