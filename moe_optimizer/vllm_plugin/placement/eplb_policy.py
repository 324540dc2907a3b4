"""Puts our placement solver under vLLM's expert load balancer (EPLB) as its policy."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch

from moe_optimizer.errors import RequiredNotAppliedError, described
from moe_optimizer.log import get_logger
from moe_optimizer.placement import place_experts
from moe_optimizer.vllm_plugin.placement.expert_placement import PLACEMENT_PASS
from moe_optimizer.vllm_plugin.server_facts import world
from moe_optimizer.vllm_plugin.session import PluginSession, current_session

_POLICY_NAME = "default"
"""vLLM moves experts beside its forward passes only under a policy of this name, and its flag takes no other."""
_ARGUMENTS = ("weight", "num_replicas", "num_groups", "num_nodes", "num_ranks", "old_global_expert_indices")

logger = get_logger(__name__)


def register_policy(session: PluginSession) -> None:
    """Put our policy in the place of vLLM's default one, in processes that hold a part of the model.

    A vLLM with another table of policies or another interface is left as it is, with the reason in the proof.
    """
    if session.proof.role == "frontend":
        return
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed.eplb import policy

    config = get_current_vllm_config_or_none()
    if config is not None and not config.parallel_config.enable_eplb:
        # A plain `vllm serve`, whose plan is made while it builds the model: too late for flags.
        session.refused(PLACEMENT_PASS, "needs --enable-eplb, which vLLM was started without")
        return
    table = policy.EPLB_POLICIES
    if getattr(table.get(_POLICY_NAME), "made_by_moe_optimizer", False):
        return
    reason = _why_not(policy, table)
    if reason:
        session.refused(PLACEMENT_PASS, reason)
        return
    table[_POLICY_NAME] = make_policy(policy.AbstractEplbPolicy, table[_POLICY_NAME])
    session.applied(PLACEMENT_PASS, kernel="", isa="")


def _why_not(policy: Any, table: Any) -> str:
    if set(table) != {_POLICY_NAME}:
        return f"vLLM's EPLB policies are {', '.join(map(str, table))}, known is {_POLICY_NAME}"
    for name in policy.AbstractEplbPolicy.__abstractmethods__:
        if name != "rebalance_experts":
            return f"vLLM's EPLB policies have another abstract method: {name}"
    found = tuple(inspect.signature(table[_POLICY_NAME].rebalance_experts).parameters)
    if found != _ARGUMENTS:
        return f"vLLM's EPLB policies take ({', '.join(found)}), known is ({', '.join(_ARGUMENTS)})"
    return ""


def make_policy(interface: type, stock: type) -> type:
    """Return our policy as a class of vLLM's interface; `stock` answers where ours fails."""

    class MoeOptimizerEplbPolicy(interface):
        """Places replicas with `place_experts`; on CPU tensors, as vLLM hands them over."""

        made_by_moe_optimizer = True

        @classmethod
        def rebalance_experts(cls, *arguments: Any, **named: Any) -> torch.Tensor:
            """Return the expert of each slot, int64 [layers, replicas]; the arguments are those of `_ARGUMENTS`."""
            session = current_session()
            try:
                asked = dict(zip(_ARGUMENTS, arguments, strict=False)) | named
                placement = _rebalance(**asked)
                if session is not None:
                    _note(session, asked["weight"], asked.get("old_global_expert_indices"), placement)
            except Exception as error:  # noqa: BLE001 - vLLM is serving, and its own policy can still answer
                # Every rank computes the same from the same numbers, so all of them come here.
                logger.warning("expert placement: vLLM's own policy is used: %s", described(error))
                if session is not None:
                    with contextlib.suppress(RequiredNotAppliedError):
                        session.refused(PLACEMENT_PASS, f"fallback: {described(error)}")
                return stock.rebalance_experts(*arguments, **named)
            return placement

    return MoeOptimizerEplbPolicy


def _note(session: PluginSession, load: torch.Tensor, old: torch.Tensor | None, placement: torch.Tensor) -> None:
    """Write into the proof that vLLM asked, and what a placement by a real load changed.

    vLLM first asks while it measures its memory: that shows that the policy is in place, and moves nothing.
    """
    # Where vLLM's own kernels compute the layers, nothing else has noted that this process holds a part of the model.
    session.proof.model_rank, session.proof.world_size = world()
    session.ran(PLACEMENT_PASS)
    if old is not None and old.shape == placement.shape and bool(load.any()):
        session.rearranged(PLACEMENT_PASS, int((old.cpu() != placement).sum()))


def _rebalance(
    *,
    weight: torch.Tensor,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    old_global_expert_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    old = old_global_expert_indices
    if old is not None and tuple(old.shape) != (weight.shape[0], num_replicas):
        old = None  # of another number of ranks: nothing can be kept from it
    kept = None if old is None else old.cpu().numpy()
    load = weight.double().cpu().numpy()
    return torch.from_numpy(place_experts(load, num_ranks, num_replicas, num_nodes, num_groups, kept))
