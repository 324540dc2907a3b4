"""Did vLLM read the tuned Triton configuration that the plan gives it? Seen in the server's own log."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moe_optimizer.inspection.tuned_configs import FOLDER_VARIABLE
from moe_optimizer.plan.decision import Decision
from moe_optimizer.plan.pass_params import TunedConfigsParams
from moe_optimizer.proof.verdict import Observed

TUNED_PASS = "tuned_configs"
_SAID = "Using configuration from"
"""What vLLM logs when it has read a configuration, followed by the path."""


def observed_use(decision: Decision, logs: Iterable[Path]) -> Observed:
    """Return whether every server said that it took the file of this decision.

    Args:
        decision: of the tuned_configs pass, status ON.
        logs: one for each server, after it became ready: the profile run before that looks the file up.
    """
    # The whole path: vLLM may ship a file of this name too, and takes that one where our folder does not reach it.
    path = str(Path(decision.env[FOLDER_VARIABLE]) / decision.params_as(TunedConfigsParams).file)
    for log in logs:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        if not any(_SAID in line and path in line for line in lines):
            why = "vLLM did not take it: another MoE kernel than Triton's computes the experts"
            return Observed(ran="no", why_not=why)
    return Observed(ran="yes, read by vLLM")
