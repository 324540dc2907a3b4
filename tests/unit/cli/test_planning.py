from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer import env
from moe_optimizer.cli import planning
from moe_optimizer.cli.options import ServeOptions

TINY_MOE = str(Path(__file__).resolve().parents[3] / "examples" / "tiny-moe")


def test_memory_of_a_switched_off_server_is_planned_with_vllms_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServeOptions(model=TINY_MOE, hardware="h100_sxm", gpus=1, profile="aggressive")
    on = planning.make(options).plan
    monkeypatch.setenv(env.DISABLE, "1")
    off = planning.make(options).plan
    # Plain vLLM is not told the 0.95 of the profile, so neither cache nor length may be planned with them.
    assert on.memory.budget_bytes == pytest.approx(0.95 * on.memory.total_bytes, rel=1e-6)
    assert off.memory.budget_bytes == pytest.approx(0.90 * off.memory.total_bytes, rel=1e-6)
    assert "--gpu-memory-utilization" not in off.serve_args
