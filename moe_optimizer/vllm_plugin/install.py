"""Installs a plan in a vLLM process: the patches of each of its passes, with the outcome in the proof.

Nothing here changes vLLM when it is called a second time in the same process. What goes wrong with a pass leaves vLLM
as it is, with the reason in the proof; only a required pass ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moe_optimizer.errors import RequiredNotAppliedError, described
from moe_optimizer.log import get_logger
from moe_optimizer.plan.decision import Decision
from moe_optimizer.plan.pass_params import ExpertPlacementParams, FlashDmoeParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.shown import flag_decisions
from moe_optimizer.vllm_plugin.compat import supported_version
from moe_optimizer.vllm_plugin.compile_factor import add_compile_factor
from moe_optimizer.vllm_plugin.expert_load.capture import LOAD_PASS
from moe_optimizer.vllm_plugin.experts.fp8_oracle import FP8_ORACLE
from moe_optimizer.vllm_plugin.experts.layerwise_loading import LAYERWISE_LOADING
from moe_optimizer.vllm_plugin.experts.online_fp8_quantizer import ONLINE_FP8_QUANTIZER
from moe_optimizer.vllm_plugin.experts.unquantized_oracle import UNQUANTIZED_ORACLE
from moe_optimizer.vllm_plugin.experts.weight_format_fp8 import FP8_PASS
from moe_optimizer.vllm_plugin.patch import Patch, PatchReport, PatchState, apply_when_imported
from moe_optimizer.vllm_plugin.placement.expert_placement import PLACEMENT_PASS
from moe_optimizer.vllm_plugin.placement.routed_experts import ROUTED_EXPERTS
from moe_optimizer.vllm_plugin.server_facts import ServerFacts
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession, start_session
from moe_optimizer.vllm_plugin.worker.captured_graphs import captures_graphs
from moe_optimizer.vllm_plugin.worker.execute_model import WORKER_EXECUTE_MODEL
from moe_optimizer.vllm_plugin.worker.model_loaded import WORKER_MODEL_LOADED

logger = get_logger(__name__)

SPARSITY_PASS = "sparsity_24"


def install_plan(plan: Plan, *, run_dir: Path) -> PluginSession:
    """Install the decisions of `plan` that are the plugin's; the proof goes under `run_dir`.

    Raises:
        RequiredNotAppliedError: a required pass cannot be applied.
    """
    session = start_session(PluginSession(run_dir=run_dir, plan=plan))
    _install_decisions(session)
    _watch_flags(session)
    return session


def install_later(make_plan: Callable[[ServerFacts], Plan], *, run_dir: Path) -> PluginSession:
    """Install what lets a plan be made when vLLM builds its model: only then is its configuration known."""
    session = start_session(PluginSession(run_dir=run_dir, make_plan=make_plan, on_plan=_install_decisions))
    # The plan is made where vLLM chooses the kernel of its first MoE layer: in our patch of that choice.
    _try(session, EXPERTS_PASS, install_experts)
    # That choice is a part of building the first layer, which ends in our patch of the layers.
    _try(session, PLACEMENT_PASS, lambda session: _patch(session, (), ROUTED_EXPERTS))
    # The API server never learns the plan: it shows what the workers write, if they do.
    _try(session, LOAD_PASS, _show_expert_load)
    return session


def _install_decisions(session: PluginSession) -> None:
    assert session.plan is not None
    for decision in session.plan.plugin_decisions:
        installer = INSTALLERS.get(decision.pass_name)
        if installer is None:
            session.refused(decision.pass_name, "this version of the plugin does not carry it out")
        else:
            _try(session, decision.pass_name, installer, decision)


def _try(session: PluginSession, pass_name: str, installer: Callable[..., None], *decision: Decision) -> None:
    try:
        installer(session, *decision)
    except RequiredNotAppliedError:
        raise
    except Exception as error:  # noqa: BLE001 - the process is vLLM's
        reason = f"fallback: {described(error)}"
        logger.warning("%s is not applied: %s", pass_name, reason)
        session.refused(pass_name, reason)
    session.patches_changed()


def install_experts(session: PluginSession, decision: Decision | None = None) -> None:
    """Offer our experts classes to vLLM's kernel choice; without a plan yet, they wait for one that wants them."""
    if not _vllm_fits(session, EXPERTS_PASS, changes_graph=True):
        return
    _patch(session, (EXPERTS_PASS,), UNQUANTIZED_ORACLE)
    if decision is None or decision.params_as(FlashDmoeParams).kernel == "cuda":
        _patch(session, (EXPERTS_PASS,), FP8_ORACLE)


def install_fp8(session: PluginSession, decision: Decision) -> None:
    """Have the experts converted by the plugin, or all weights by vLLM with another quantiser."""
    if decision.weight_format is not None:
        install_conversion(session, decision)
    else:
        _patch(session, (FP8_PASS,), ONLINE_FP8_QUANTIZER, refusal="vLLM's own quantizer is used: ")


def install_conversion(session: PluginSession, decision: Decision) -> None:
    """Have the experts class convert a layer while the next ones are loaded."""
    if session.wanted(EXPERTS_PASS) is None:
        session.refused(decision.pass_name, f"needs {EXPERTS_PASS}: no other kernel reads the converted experts")
        return
    # Where this patch is refused, the layers are converted after all of them are loaded: more memory, the same server.
    _patch(session, (), LAYERWISE_LOADING)


def install_expert_load(session: PluginSession, decision: Decision) -> None:  # noqa: ARG001 - read by the counter
    """Have the workers count tokens per expert, and the API server show the counts."""
    if not _vllm_fits(session, LOAD_PASS, changes_graph=True):
        return
    _patch(session, (LOAD_PASS,), WORKER_MODEL_LOADED, WORKER_EXECUTE_MODEL)
    _show_expert_load(session)


def _show_expert_load(session: PluginSession) -> None:
    """Show on /metrics, in the process that answers it, what the workers of this run have counted."""
    if session.proof.role == "frontend":
        from moe_optimizer.vllm_plugin.expert_load.metrics import show_on_metrics

        show_on_metrics(session.run_dir)


def install_placement(session: PluginSession, decision: Decision) -> None:
    """Place experts by expert maps before loading, or as the policy of vLLM's EPLB."""
    if not _vllm_fits(session, PLACEMENT_PASS, changes_graph=False):
        return
    if decision.params_as(ExpertPlacementParams).mode == "eplb":
        from moe_optimizer.vllm_plugin.placement.eplb_policy import register_policy

        register_policy(session)
        return
    _patch(session, (PLACEMENT_PASS,), ROUTED_EXPERTS)


INSTALLERS: Mapping[str, Callable[[PluginSession, Decision], Any]] = {
    EXPERTS_PASS: install_experts,
    LOAD_PASS: install_expert_load,
    PLACEMENT_PASS: install_placement,
    FP8_PASS: install_fp8,
    SPARSITY_PASS: install_conversion,
}
"""Pass -> what installs it. It calls `session.applied` when the pass took effect and `session.refused` when it does
not, at once or from a callback."""


def _watch_flags(session: PluginSession) -> None:
    """Have this process show what became of the plan's flags once its model is loaded, if it loads one."""
    assert session.plan is not None, "flags of a plan that is not made"
    decisions = flag_decisions(session.plan)
    if not decisions:
        return

    import vllm

    names = tuple(decision.pass_name for decision in decisions)
    with_graphs = tuple(decision.pass_name for decision in decisions if captures_graphs(decision))
    supported, why_not = supported_version(str(vllm.__version__))
    if not supported:
        for name in names:
            session.refused(name, f"cannot be shown: {why_not}")
        return
    _patch(session, names, WORKER_MODEL_LOADED, refusal="cannot be shown: ")
    if with_graphs:
        _patch(session, with_graphs, WORKER_EXECUTE_MODEL, refusal="cannot be shown: ")


def _vllm_fits(session: PluginSession, pass_name: str, *, changes_graph: bool) -> bool:
    """Return whether the pass can go into this vLLM; when not, it is refused with the reason.

    Args:
        session: this process's.
        pass_name: the pass.
        changes_graph: its parts end up in compiled graphs, which then need a cache key of their own.

    Raises:
        RequiredNotAppliedError: it cannot, and the plan requires the pass.
    """
    import vllm

    supported, why_not = supported_version(str(vllm.__version__))
    if supported:
        why_not = add_compile_factor() if changes_graph else ""
    if why_not:
        session.refused(pass_name, why_not)
    return not why_not


def _patch(session: PluginSession, pass_names: tuple[str, ...], *patches: Patch, refusal: str = "") -> None:
    """Apply each patch once its module is imported; one that vLLM no longer fits refuses the passes, if any."""

    def patched(report: PatchReport) -> None:
        session.patches_changed()
        if report.state is PatchState.REFUSED:
            for name in pass_names:
                session.refused(name, f"{refusal}{report.detail}")

    for patch in patches:
        apply_when_imported(patch, on_change=patched)
