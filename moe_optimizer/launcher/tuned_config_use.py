"""Checks in the servers' logs that vLLM read the planned Triton configuration."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moe_optimizer.inspection.tuned_configs import FOLDER_VARIABLE
from moe_optimizer.plan.decision import Decision
from moe_optimizer.plan.pass_params import TunedConfigsParams
from moe_optimizer.proof.verdict import Observed

TUNED_PASS = "tuned_configs"
_READ_LINE = "Using configuration from"
"""vLLM logs this with the path when it has read a configuration."""


def observed_use(decision: Decision, logs: Iterable[Path]) -> Observed:
    """Return whether every server logged that it read the file of this decision.

    Args:
        decision: of the tuned_configs pass, status ON.
        logs: one for each server that is ready; vLLM looks the file up in its profile run before.
    """
    # The whole path, because vLLM may ship a file of this name too.
    path = str(Path(decision.env[FOLDER_VARIABLE]) / decision.params_as(TunedConfigsParams).file)
    for log in logs:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        if not any(_READ_LINE in line and path in line for line in lines):
            why = "vLLM did not take it: another MoE kernel than Triton's computes the experts"
            return Observed(ran="no", why_not=why)
    return Observed(ran="yes, read by vLLM")
