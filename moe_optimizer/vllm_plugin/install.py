"""Installs a plan in a vLLM process: the patches of each of its passes, with the outcome in the proof.

Installing twice in one process changes nothing. A pass that fails leaves vLLM as it is, with the reason in the proof;
only a required pass ends the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moe_optimizer.errors import RequiredNotAppliedError, described
from moe_optimizer.log import get_logger
from moe_optimizer.plan.decision import Decision
from moe_optimizer.plan.pass_params import DualBatchOverlapParams, ExpertPlacementParams, FlashDmoeParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.shown import flag_decisions
from moe_optimizer.specs.expert_formats import INT4, MXFP4
from moe_optimizer.vllm_plugin.compat import supported_version
from moe_optimizer.vllm_plugin.compile_factor import add_compile_factor
from moe_optimizer.vllm_plugin.expert_load.capture import LOAD_PASS
from moe_optimizer.vllm_plugin.experts.gpt_oss_choice import GPT_OSS_CHOICE, GPT_OSS_LOADED
from moe_optimizer.vllm_plugin.experts.int4_choice import INT4_CHOICE, INT4_LOADED
from moe_optimizer.vllm_plugin.experts.kernel_choice import FP8_ORACLE, UNQUANTIZED_ORACLE
from moe_optimizer.vllm_plugin.experts.layerwise_loading import LAYERWISE_LOADING
from moe_optimizer.vllm_plugin.experts.lora import MOE_LAYER_CONFIG
from moe_optimizer.vllm_plugin.experts.online_fp8_quantizer import ONLINE_FP8_QUANTIZER
from moe_optimizer.vllm_plugin.experts.weight_format_fp8 import FP8_PASS
from moe_optimizer.vllm_plugin.experts.weight_format_mxfp4 import FOUR_BIT_PASS
from moe_optimizer.vllm_plugin.experts.weight_format_sparse import SPARSITY_PASS
from moe_optimizer.vllm_plugin.linears import SKINNY_PASS
from moe_optimizer.vllm_plugin.patch import Patch, PatchReport, PatchState, apply_when_imported
from moe_optimizer.vllm_plugin.placement.expert_placement import PLACEMENT_PASS, ROUTED_EXPERTS
from moe_optimizer.vllm_plugin.server_facts import ServerFacts
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession, current_session, start_session
from moe_optimizer.vllm_plugin.worker.captured_graphs import captures_graphs
from moe_optimizer.vllm_plugin.worker.compilations import JIT_EVENTS
from moe_optimizer.vllm_plugin.worker.draft_sampling import DRAFT_SAMPLING
from moe_optimizer.vllm_plugin.worker.drafts import checks_drafts
from moe_optimizer.vllm_plugin.worker.execute_model import WORKER_EXECUTE_MODEL
from moe_optimizer.vllm_plugin.worker.half_batches import HALF_BATCH_METADATA
from moe_optimizer.vllm_plugin.worker.model_loaded import WORKER_MODEL_LOADED

logger = get_logger(__name__)

_NOT_SHOWN = "cannot be shown: "


def install_plan(plan: Plan, *, run_dir: Path) -> PluginSession:
    """Install the decisions of `plan` that are the plugin's, and the proof of those that are vLLM's arguments.

    Args:
        plan: the plan.
        run_dir: gets the proof.

    Raises:
        RequiredNotAppliedError: a required pass cannot be applied.
    """
    session = start_session(PluginSession(run_dir=run_dir, plan=plan))
    _install_decisions(session)
    for decision in flag_decisions(plan):
        _try(session, decision.pass_name, _install_flag_proof, decision)
    if plan.plugin_decisions:
        _count_compilations(session)
    return session


def install_later(make_plan: Callable[[ServerFacts], Plan], *, run_dir: Path) -> PluginSession:
    """Install what makes the plan when vLLM builds its model; its configuration is not known before."""
    session = start_session(PluginSession(run_dir=run_dir, make_plan=make_plan, on_plan=_install_decisions))
    # The plan is made in our patch of the place where vLLM chooses the kernel of its first MoE layer.
    _try(session, EXPERTS_PASS, install_experts)
    # The first layer reaches this patch after that choice.
    _try(session, PLACEMENT_PASS, lambda session: _patch(session, None, ROUTED_EXPERTS))
    # The API server never has the plan: it shows what the workers write, if they do.
    _try(session, LOAD_PASS, _show_expert_load)
    _count_compilations(session)
    return session


def _count_compilations(session: PluginSession) -> None:
    """Have workers count what they compile, and the API server show it; a failure leaves the count out."""
    try:
        _install_compilation_count(session)
    except Exception as error:  # noqa: BLE001 - the process is vLLM's
        logger.warning("compilations are not counted: %s", described(error))


def _install_compilation_count(session: PluginSession) -> None:
    vllm = sys.modules.get("vllm")
    if vllm is None or not supported_version(str(vllm.__version__))[0]:
        return
    _patch(session, None, WORKER_MODEL_LOADED, WORKER_EXECUTE_MODEL, JIT_EVENTS)
    if session.proof.role == "frontend":
        from moe_optimizer.vllm_plugin.kernel_metrics import kernel_metrics
        from moe_optimizer.vllm_plugin.metrics_page import show_on_metrics
        from moe_optimizer.vllm_plugin.proof_metrics import proof_metrics

        show_on_metrics(session.run_dir, proof_metrics, kernel_metrics)


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
    """Offer our experts classes to vLLM's kernel choice; without a plan yet, they wait for one with the pass on."""
    if not _vllm_fits(session, EXPERTS_PASS, changes_graph=True):
        return
    _patch(session, EXPERTS_PASS, UNQUANTIZED_ORACLE)
    if decision is None or decision.params_as(FlashDmoeParams).kernel == "cuda":
        _patch(session, EXPERTS_PASS, FP8_ORACLE)
    # Without a plan it is not known whose weights will come.
    stored, needed_by = ("", None) if session.plan is None else (session.plan.model.expert_format, EXPERTS_PASS)
    if stored in ("", MXFP4):
        _patch(session, needed_by, GPT_OSS_CHOICE, GPT_OSS_LOADED)
    if stored in ("", INT4):
        methods = INT4_LOADED if session.plan is None else (str(session.plan.model.quant_method),)
        _patch(session, needed_by, INT4_CHOICE, *(patch for method in methods for patch in INT4_LOADED[method]))
    # Where the first is refused, the experts serve without the canary, and the proof has none; where the second is,
    # they are vLLM's in a server with LoRA adapters.
    _patch(session, None, WORKER_MODEL_LOADED, MOE_LAYER_CONFIG)


def install_fp8(session: PluginSession, decision: Decision) -> None:
    """Have the experts converted by the plugin, or all weights by vLLM with another quantiser."""
    if decision.weight_format is not None:
        install_conversion(session, decision)
    else:
        _patch(session, FP8_PASS, ONLINE_FP8_QUANTIZER, refusal="vLLM's own quantizer is used: ")


def install_conversion(session: PluginSession, decision: Decision) -> None:
    """Have the experts class convert a layer while the next ones are loaded."""
    if session.wanted(EXPERTS_PASS) is None:
        session.refused(decision.pass_name, f"needs {EXPERTS_PASS}: no other kernel reads the converted experts")
        return
    # Where this patch is refused, the layers are converted after all of them are loaded: more memory, the same server.
    _patch(session, None, LAYERWISE_LOADING)


def install_expert_load(session: PluginSession, decision: Decision) -> None:  # noqa: ARG001 - read by the counter
    """Have the workers count tokens per expert, and the API server show the counts."""
    if not _vllm_fits(session, LOAD_PASS, changes_graph=True):
        return
    _patch(session, LOAD_PASS, WORKER_MODEL_LOADED, WORKER_EXECUTE_MODEL)
    _show_expert_load(session)


def _show_expert_load(session: PluginSession) -> None:
    """Show on /metrics, in the process that answers it, what the workers of this run have counted."""
    if session.proof.role == "frontend":
        from moe_optimizer.vllm_plugin.expert_load.metrics import expert_load_metrics
        from moe_optimizer.vllm_plugin.metrics_page import show_on_metrics

        show_on_metrics(session.run_dir, expert_load_metrics)


def install_linears(session: PluginSession, decision: Decision) -> None:  # noqa: ARG001 - it says no more than on
    """Have our kernel multiply few tokens with dense weights, once the model is loaded."""
    if _vllm_fits(session, SKINNY_PASS, changes_graph=True):
        _patch(session, SKINNY_PASS, WORKER_MODEL_LOADED)


def install_placement(session: PluginSession, decision: Decision) -> None:
    """Place experts by expert maps before loading, or as the policy of vLLM's EPLB."""
    if not _vllm_fits(session, PLACEMENT_PASS):
        return
    if decision.params_as(ExpertPlacementParams).mode == "eplb":
        from moe_optimizer.vllm_plugin.placement.eplb_policy import register_policy

        register_policy(session)
        return
    _patch(session, PLACEMENT_PASS, ROUTED_EXPERTS)


INSTALLERS: Mapping[str, Callable[[PluginSession, Decision], Any]] = {
    EXPERTS_PASS: install_experts,
    LOAD_PASS: install_expert_load,
    PLACEMENT_PASS: install_placement,
    FP8_PASS: install_fp8,
    FOUR_BIT_PASS: install_conversion,
    SPARSITY_PASS: install_conversion,
    SKINNY_PASS: install_linears,
}
"""Pass -> its installer, which calls `session.applied` or `session.refused`, at once or from a callback."""


def _install_flag_proof(session: PluginSession, decision: Decision) -> None:
    """Have each worker write into its proof, once its model is loaded, what became of a decision's arguments."""
    if not _vllm_fits(session, decision.pass_name, refusal=_NOT_SHOWN):
        return
    _patch(session, decision.pass_name, WORKER_MODEL_LOADED, refusal=_NOT_SHOWN)
    if captures_graphs(decision) or checks_drafts(decision):
        _patch(session, decision.pass_name, WORKER_EXECUTE_MODEL, refusal=_NOT_SHOWN)
    if checks_drafts(decision) and session.plan is not None and not session.plan.num_gpus:
        _patch(session, decision.pass_name, DRAFT_SAMPLING, refusal="sampled answers may be wrong: ")
    if isinstance(decision.params, DualBatchOverlapParams):
        _patch(session, decision.pass_name, HALF_BATCH_METADATA, refusal="answers may be wrong: ")


def _vllm_fits(session: PluginSession, pass_name: str, *, changes_graph: bool = False, refusal: str = "") -> bool:
    """Return whether the pass can go into this vLLM; when not, it is refused with the reason.

    Args:
        session: this process's.
        pass_name: the pass.
        changes_graph: its parts end up in compiled graphs, which then need a cache key of their own.
        refusal: what the reason begins with.

    Raises:
        RequiredNotAppliedError: it cannot, and the plan requires the pass.
    """
    import vllm

    supported, why_not = supported_version(str(vllm.__version__))
    if supported:
        why_not = add_compile_factor() if changes_graph else ""
    if why_not:
        session.refused(pass_name, f"{refusal}{why_not}")
    return not why_not


def _patch(session: PluginSession, pass_name: str | None, *patches: Patch, refusal: str = "") -> None:
    """Apply each patch once its module is imported; one that does not fit this vLLM refuses the pass, if any."""

    def patched(report: PatchReport) -> None:
        # A process that was forked meanwhile has a session and a proof of its own; the parent's are not its to write.
        own = session if session.pid == os.getpid() else current_session() or session
        own.patches_changed()
        if report.state is PatchState.REFUSED and pass_name is not None:
            own.refused(pass_name, f"{refusal}{report.detail}")

    for patch in patches:
        apply_when_imported(patch, on_change=patched)
