"""Scripts that write files of the repository do so only when asked in words they know."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.mark.parametrize("name", ["build_wheels", "update_class_defaults", "write_kernel_speeds", "write_schemas"])
@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--halp", 2)])
def test_help_is_shown_and_an_unknown_option_refused(
    name: str, argument: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = SCRIPTS / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(script), argument])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == status
    shown = capsys.readouterr()
    assert (shown.err if status else shown.out).startswith(f"usage: {name}.py")
