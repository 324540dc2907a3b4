"""Gives each MoE layer the expert map of the plan, before its weights are loaded through that map.

A layer's expert map says which experts live in this process and in which slot. vLLM loads weights and routes tokens
through it, so both follow a map that is changed before loading. All ranks must take the same placement, or experts
would be missing: they agree on each layer before one of them changes it. They ask each other even where nothing is
planned, because a rank that failed to plan must not leave the others waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moe_optimizer.errors import RequiredNotAppliedError, described
from moe_optimizer.plan.pass_params import ExpertPlacementParams
from moe_optimizer.specs.layer_name import decoder_layer
from moe_optimizer.vllm_plugin.patch import Patch
from moe_optimizer.vllm_plugin.session import PluginSession, current_session

if TYPE_CHECKING:
    import torch

PLACEMENT_PASS = "expert_placement"
"""The pass whose decision says where experts live."""

_PLACED = "placed_by_moe_optimizer"
"""Attribute of a vLLM layer with a map of ours."""


class _PlacedLayer:
    """A layer with a map of ours; remembers which experts vLLM asked the map for while loading."""

    def __init__(self, expert_map: torch.Tensor, map_global_to_local: Callable[[int], int], load_format: str) -> None:
        self.expert_map = expert_map
        self.asked: set[int] = set()
        self.load_format = load_format
        self._original = map_global_to_local

    def map_global_to_local(self, global_id: int) -> int:
        """Return the slot that an expert is loaded into, -1 for none; vLLM's ExpertMapManager has this method."""
        self.asked.add(global_id)
        return self._original(global_id)


def place_layer(session: PluginSession, layer: Any) -> None:
    """Give a vLLM RoutedExperts its expert map, if the plan has one and every rank can.

    Raises:
        RequiredNotAppliedError: the layer cannot be placed, and the plan requires it. Any other failure leaves the
            layer of every rank as vLLM made it, with the reason in the proof.
    """
    if layer.expert_map_manager.expert_map is None:
        # No expert parallelism in this layer.
        return
    planned = _planned(session, layer)
    expert_map, reason = (None, "") if planned is None else _possible_map(layer, planned)
    try:
        agreed = all_ranks_can(expert_map is not None)
    except Exception as error:  # noqa: BLE001 - no rank hears the others; each leaves its layer alone
        agreed, reason = False, f"fallback: {described(error)}"
    if planned is None:
        return
    if not agreed:
        why = reason or "another rank cannot take its experts"
        session.refused(PLACEMENT_PASS, f"{layer.layer_name}: {why}")
        return
    from vllm.config import get_current_vllm_config

    assert expert_map is not None
    manager = layer.expert_map_manager
    manager._expert_map = expert_map
    layer.update_expert_map_info()
    load_format = str(get_current_vllm_config().load_config.load_format)
    placed = _PlacedLayer(expert_map, manager.map_global_to_local, load_format)
    setattr(layer, _PLACED, placed)
    session.ask_of_layers(passes_of_placed)
    manager.map_global_to_local = placed.map_global_to_local
    _confirm_when_loaded(session, layer)
    session.applied(PLACEMENT_PASS, kernel="", isa="")
    session.proof.passes[PLACEMENT_PASS].digest = planned.digest


def _planned(session: PluginSession, layer: Any) -> ExpertPlacementParams | None:
    """Return the plan's placement; None when it has none of this layer, as for the layers of a draft model."""
    decision = session.wanted(PLACEMENT_PASS)
    if decision is None:
        return None
    params = decision.params_as(ExpertPlacementParams)
    return params if decoder_layer(layer.layer_name) in params.experts else None


def _confirm_when_loaded(session: PluginSession, layer: Any) -> None:
    """Check the layer once vLLM has loaded it: the only proof of a layer whose kernel does not count calls for us."""
    method = layer.quant_method
    original = method.process_weights_after_loading

    @functools.wraps(original)
    def process_weights_after_loading(loaded: Any) -> None:
        original(loaded)
        passes_of_placed(loaded)
        counted = {known.name for known in session.proof.passes[PLACEMENT_PASS].layers}
        if loaded.layer_name not in counted:
            session.ran(PLACEMENT_PASS)

    method.process_weights_after_loading = process_weights_after_loading


def _possible_map(layer: Any, planned: ExpertPlacementParams) -> tuple[torch.Tensor | None, str]:
    """Return this rank's map, or None with the reason."""
    try:
        reason = _why_not(layer, planned)
        return (None, reason) if reason else (_expert_map(layer, planned), "")
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's answer
        return None, f"fallback: {described(error)}"


def _why_not(layer: Any, planned: ExpertPlacementParams) -> str:
    from vllm.config import get_current_vllm_config

    from moe_optimizer.vllm_plugin.experts.base import MoeOptimizerExperts

    parallel = layer.moe_config.moe_parallel_config
    manager = layer.expert_map_manager
    chosen = getattr(layer.quant_method, "experts_cls", None)
    if not (isinstance(chosen, type) and issubclass(chosen, MoeOptimizerExperts)):
        name = getattr(chosen, "__name__", "an unknown kernel")
        return f"{name} computes the layer, and only our kernels were shown to follow the expert map"
    if (parallel.ep_size, layer.global_num_experts) != (planned.num_ranks, planned.num_experts):
        return (
            f"{layer.global_num_experts} experts on {parallel.ep_size} ranks, the placement is for "
            f"{planned.num_experts} on {planned.num_ranks}"
        )
    if parallel.use_all2all_kernels:
        return "tokens are sent to ranks by expert number"
    if getattr(parallel, "enable_eplb", False):
        return "vLLM's EPLB places the experts"
    if manager.placement_strategy != "linear" or manager.num_fused_shared_experts or manager.expert_mask is not None:
        return f"vLLM's expert map is of another kind ({manager.placement_strategy})"
    config = get_current_vllm_config()
    if getattr(config.parallel_config, "enable_ep_weight_filter", False):
        return "--enable-ep-weight-filter leaves out weights by expert number"
    return ""


def _expert_map(layer: Any, planned: ExpertPlacementParams) -> torch.Tensor:
    """Return the map of this rank: slot by expert, -1 for experts of other ranks."""
    import torch

    manager = layer.expert_map_manager
    index = decoder_layer(layer.layer_name)
    assert index is not None, layer.layer_name
    experts = [int(number) for number in planned.experts[index].split()]
    assert sorted(experts) == list(range(layer.global_num_experts)), f"{layer.layer_name}: {experts}"
    count = manager.local_num_experts
    first = manager.ep_rank * count
    mine = sorted(experts[first : first + count])
    expert_map = torch.full_like(manager.expert_map, -1)
    expert_map[torch.tensor(mine)] = torch.arange(count, dtype=expert_map.dtype, device=expert_map.device)
    return expert_map


def all_ranks_can(this_one: bool) -> bool:
    """Return whether every rank of the expert parallel group can. Each rank must ask for each layer, in order."""
    import torch
    from vllm.distributed import get_ep_group

    # On the CPU, over which the group's messages go, whatever device vLLM builds its model on.
    answer = torch.tensor([int(this_one)], device="cpu")
    torch.distributed.all_reduce(answer, op=torch.distributed.ReduceOp.MIN, group=get_ep_group().cpu_group)
    return bool(answer.item())


def passes_of_placed(layer: Any) -> tuple[str, ...]:
    """Return the pass that a loaded layer counts for: ("expert_placement",) if it was placed here, else ().

    Raises:
        RequiredNotAppliedError: its weights were not loaded through its map, so it would compute with wrong experts.
    """
    placed: _PlacedLayer | None = getattr(layer, _PLACED, None)
    if placed is None:
        return ()
    local = set((placed.expert_map >= 0).nonzero().flatten().tolist())
    unasked = local - placed.asked
    wrong = ""
    # Dummy weights are not loaded through the map.
    if unasked and placed.load_format != "dummy":
        wrong = (
            f"vLLM loaded {len(unasked)} of {len(local)} experts without asking the expert map, so they are not the "
            "ones that tokens are sent to"
        )
    elif layer.expert_map is None or layer.expert_map.tolist() != placed.expert_map.tolist():
        wrong = "its expert map was replaced after its weights were loaded"
    if wrong:
        hint = "serve with --disable-expert-placement"
        raise RequiredNotAppliedError(f"{PLACEMENT_PASS}: {layer.layer_name}: {wrong}", hint=hint)
    return (PLACEMENT_PASS,)


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - the method that is replaced
        # Afterwards vLLM has chosen the kernel of the layer, and no weight has been loaded.
        original(self, *args, **kwargs)
        session = current_session()
        if session is not None:
            place_layer(session, self)

    return __init__


ROUTED_EXPERTS = Patch(
    target="vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts.__init__",
    why="vLLM places experts in order or round robin; there is no argument for a placement of one's own",
    remove_when="--expert-placement-strategy takes a placement, or EPLB starts from one",
    fingerprints={
        "0.26": "f563625bf2f1a6a3",
        "0.27": "70ffacbd1db90651",
        "0.28 to 0.29": "037e874b705f7f81",
        "0.30 to 0.31": "17346878a9d9ec0c",
        "0.32": "7e213af372b96d20",
        "0.33": "451b9be5729f2d63",
    },
    replacement=_replacement,
)
