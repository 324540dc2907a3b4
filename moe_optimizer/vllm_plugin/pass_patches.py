"""What every pass that patches vLLM does alike: ask whether this vLLM fits, install, and report in the proof."""

from __future__ import annotations

from moe_optimizer.vllm_plugin.activation import Activation
from moe_optimizer.vllm_plugin.compat import supported_version
from moe_optimizer.vllm_plugin.compile_factor import add_compile_factor
from moe_optimizer.vllm_plugin.patch import Patch, PatchReport, PatchState, apply_when_imported


def vllm_fits(activation: Activation, pass_name: str, *, changes_graph: bool) -> bool:
    """Return whether the pass can go into this vLLM; when not, it is refused with the reason.

    Args:
        activation: this process's.
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
        activation.refused(pass_name, why_not)
    return not why_not


def install_patches(activation: Activation, pass_name: str, *patches: Patch) -> None:
    """Apply each patch once its module is imported; one that vLLM no longer fits refuses the pass."""

    def patched(report: PatchReport) -> None:
        activation.patches_changed()
        if report.state is PatchState.REFUSED:
            activation.refused(pass_name, report.detail)

    for patch in patches:
        apply_when_imported(patch, on_change=patched)
