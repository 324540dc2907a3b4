"""The dashboard that is committed is the one that the script writes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "write_grafana.py"


def test_the_committed_dashboard_is_current() -> None:
    spec = importlib.util.spec_from_file_location("write_grafana", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads(module.FILE.read_text(encoding="utf-8")) == module.dashboard()
