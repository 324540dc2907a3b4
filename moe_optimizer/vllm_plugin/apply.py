"""Carries a plan out inside a vLLM process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.log import get_logger
from moe_optimizer.plan.plan import Plan
from moe_optimizer.vllm_plugin.activation import (
    EXPERTS_PASS,
    Activation,
    activate,
    plugin_decisions,
)
from moe_optimizer.vllm_plugin.appliers import applier
from moe_optimizer.vllm_plugin.expert_load.apply_expert_load import show_expert_load
from moe_optimizer.vllm_plugin.expert_load.capture import LOAD_PASS
from moe_optimizer.vllm_plugin.experts.apply_experts import offer_experts
from moe_optimizer.vllm_plugin.placement.apply_placement import offer_placement
from moe_optimizer.vllm_plugin.placement.expert_placement import PLACEMENT_PASS
from moe_optimizer.vllm_plugin.proof import described
from moe_optimizer.vllm_plugin.server_facts import ServerFacts
from moe_optimizer.vllm_plugin.watch_flags import watch_flags

logger = get_logger(__name__)


def apply_plan(plan: Plan, *, run_dir: Path) -> Activation:
    """Apply the decisions of `plan` that are the plugin's; the proof goes under `run_dir`.

    Called again in the same process, it changes nothing.

    Raises:
        RequiredNotAppliedError: a required pass cannot be applied. Everything else that goes wrong leaves vLLM
            as it is, with the reason in the proof.
    """
    activation = activate(Activation(run_dir=run_dir, plan=plan))
    _apply_decisions(activation)
    watch_flags(activation)
    return activation


def apply_later(make_plan: Callable[[ServerFacts], Plan], *, run_dir: Path) -> Activation:
    """As `apply_plan`, with a plan that is made when vLLM builds its model and its configuration is known."""
    activation = activate(Activation(run_dir=run_dir, make_plan=make_plan, on_plan=_apply_decisions))
    # The plan is made where vLLM chooses the kernel of its first MoE layer: in our patch of that choice.
    _install(activation, EXPERTS_PASS, offer_experts)
    # That choice is a part of building the first layer, which ends in our patch of the layers.
    _install(activation, PLACEMENT_PASS, offer_placement)
    # The API server never learns the plan: it shows what the workers write, if they do.
    _install(activation, LOAD_PASS, show_expert_load)
    return activation


def _apply_decisions(activation: Activation) -> None:
    assert activation.plan is not None
    for decision in plugin_decisions(activation.plan):
        function = applier(decision.pass_name)
        if function is None:
            activation.refused(decision.pass_name, "this version of the plugin does not carry it out")
        else:
            _install(activation, decision.pass_name, functools.partial(function, decision=decision))


def _install(activation: Activation, pass_name: str, function: Callable[[Activation], None]) -> None:
    try:
        function(activation)
    except RequiredNotAppliedError:
        raise
    except Exception as error:  # noqa: BLE001 - the process is vLLM's
        reason = f"fallback: {described(error)}"
        logger.warning("%s is not applied: %s", pass_name, reason)
        activation.refused(pass_name, reason)
    activation.patches_changed()
