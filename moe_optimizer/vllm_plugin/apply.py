"""Carries a plan out inside a vLLM process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.log import get_logger
from moe_optimizer.plan.plan import Plan
from moe_optimizer.vllm_plugin.activation import (
    EXPERTS_PASS,
    PLUGIN_PASSES,
    Activation,
    ServerFacts,
    activate,
    plugin_decisions,
)
from moe_optimizer.vllm_plugin.compat import supported_version
from moe_optimizer.vllm_plugin.compile_factor import add_compile_factor
from moe_optimizer.vllm_plugin.patch import PatchReport, PatchState, apply_when_imported
from moe_optimizer.vllm_plugin.patches.unquantized_oracle import UNQUANTIZED_ORACLE
from moe_optimizer.vllm_plugin.proof import described

logger = get_logger(__name__)


def apply_plan(plan: Plan, *, run_dir: Path) -> Activation:
    """Apply the decisions of `plan` that are the plugin's; the proof goes under `run_dir`.

    Called again in the same process, it changes nothing.

    Raises:
        RequiredNotAppliedError: a required pass cannot be applied. Everything else that goes wrong leaves vLLM
            as it is, with the reason in the proof.
    """
    activation = activate(Activation(run_dir=run_dir, plan=plan))
    for decision in plugin_decisions(plan):
        if decision.pass_name not in PLUGIN_PASSES:
            activation.refused(decision.pass_name, "this version of the plugin does not carry it out")
    if activation.wanted(EXPERTS_PASS) is not None:
        _offer_experts(activation)
    return activation


def apply_later(make_plan: Callable[[ServerFacts], Plan], *, run_dir: Path) -> Activation:
    """As `apply_plan`, with a plan that is made when vLLM builds its model and its configuration is known."""
    activation = activate(Activation(run_dir=run_dir, make_plan=make_plan))
    _offer_experts(activation)
    return activation


def _offer_experts(activation: Activation) -> None:
    try:
        reason = _install_experts_patch(activation)
    except RequiredNotAppliedError:
        raise
    except Exception as error:  # noqa: BLE001 - the process is vLLM's
        reason = f"fallback: {described(error)}"
    activation.patches_changed()
    if reason:
        logger.warning("%s is not applied: %s", EXPERTS_PASS, reason)
        activation.refused(EXPERTS_PASS, reason)


def _install_experts_patch(activation: Activation) -> str:
    """Return "" or why our experts class cannot be offered to vLLM."""
    import vllm

    supported, why_not = supported_version(str(vllm.__version__))
    if not supported:
        return why_not
    missing = add_compile_factor()
    if missing:
        return missing

    def patched(report: PatchReport) -> None:
        activation.patches_changed()
        if report.state is PatchState.REFUSED:
            activation.refused(EXPERTS_PASS, report.detail)

    apply_when_imported(UNQUANTIZED_ORACLE, on_change=patched)
    return ""
