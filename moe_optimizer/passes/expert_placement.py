"""Decides which GPU holds which expert, by their measured load."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_optimizer.errors import InputError
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Gain, Status, Wish
from moe_optimizer.plan.pass_params import ExpertPlacementParams
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.expert_balancing import balances_while_serving, given_replicas, why_not_placed
from moe_optimizer.plan_context.expert_kernel import ours_are_decided
from moe_optimizer.specs.expert_load import LoadFile
from moe_optimizer.specs.quantity import Quantity, Source

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_WORTH_IT = 1.01
"""Chosen: without being asked, experts are placed when the fullest rank gets lighter by more than this factor."""


class ExpertPlacement(OptimizationPass):
    """Placement of whole experts by their measured load, so that no rank waits for the one with the busiest experts.

    Two ways. `initial`: the plan says which rank holds which expert, and the plugin gives each layer that expert map
    before its weights are loaded. `eplb`: vLLM's own load balancer moves and replicates experts while it serves, with
    this package's solver as its policy; CUDA only.
    """

    name = "expert_placement"
    flag = "expert-placement"
    title = "place and replicate experts by their load"
    limits = "as good as the traffic is like the one measured; no speed was measured on GPUs"
    no_gain = "no load is given that was not used to place the experts"
    needs_experts = True

    def why_not(self, ctx: PlanContext) -> str:
        """Needs expert parallelism, and a way: a measured load for `initial`, CUDA for `eplb`."""
        return why_not_placed(ctx, ctx.parallelism, ours=ours_are_decided(ctx))

    def refused(self, ctx: PlanContext, reason: str) -> Decision:
        """Return the decision without the pass, and warn where the user's own flag goes to vLLM all the same."""
        decision = super().refused(ctx, reason)
        if not ctx.pinned.is_on("--enable-eplb"):
            return decision
        warning = f"--enable-eplb is given after -- and goes to vLLM, but {reason}"
        return dataclasses.replace(decision, warnings=(*decision.warnings, warning))

    def choose(self, ctx: PlanContext) -> Decision:
        """Place, say what it brings on load that was not used for it, and leave it when it brings nothing.

        Raises:
            InputError: the load is of another model or of no traffic, or --eplb-config is none.
        """
        if balances_while_serving(ctx, ctx.parallelism, ours=ours_are_decided(ctx)):
            return self._eplb(ctx)
        placed = _place(ctx, replicas=0)
        wish, _ = ctx.wish(self.name)
        if wish is Wish.AUTO and placed.before < _WORTH_IT * placed.after:
            return self.when_off(ctx, f"would not pay: {placed.in_words}")
        warnings = placed.warnings
        if ctx.section(self.name).redundant_experts:
            warnings += ("redundant_experts is not used: replicas need vLLM's EPLB, which is CUDA only",)
        return self.decision(
            ctx,
            Status.ON,
            f"placed by load, EP={ctx.parallelism.num_devices}",
            placed.in_words,
            Applier.PLUGIN,
            evidence=placed.evidence,
            rejected={"EPLB": "while it moves experts our kernel cannot compute them"} if ctx.device == "cuda" else {},
            gain=placed.gain,
            params=_initial_params(ctx, placed),
            warnings=warnings,
        )

    def _eplb(self, ctx: PlanContext) -> Decision:
        given = given_replicas(ctx)
        asked = ctx.section(self.name).redundant_experts if given is None else given
        replicas = asked + -(ctx.model.num_experts + asked) % ctx.parallelism.num_devices
        reason = "vLLM moves and replicates experts by the load of the last steps, placed by this package's solver"
        placed = None if ctx.request.expert_load is None else _place(ctx, replicas=replicas)
        warnings = () if placed is None else placed.warnings
        if replicas != asked:
            warnings += (f"redundant_experts is {replicas} instead of {asked}: every GPU gets as many experts",)
        return self.decision(
            ctx,
            Status.ON,
            f"EPLB, {replicas} replicas",
            reason if placed is None else f"{reason}; placed by the load given: {placed.in_words}",
            Applier.PLUGIN,
            evidence=() if placed is None else placed.evidence,
            gain=None if placed is None else placed.gain,
            vllm_args=ServeArguments("--enable-eplb", "--eplb-config", json.dumps({"num_redundant_experts": replicas})),
            params=ExpertPlacementParams(mode="eplb", num_redundant_experts=replicas),
            warnings=warnings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A placement and how even it is: the fullest rank's tokens over the average rank's, all layers together."""

    placement: NDArray[np.int64]
    before: float
    """Of the experts in order, as vLLM has them."""
    after: float
    placed_by: LoadFile
    checked_on: LoadFile | None
    warnings: tuple[str, ...]

    @property
    def in_words(self) -> str:
        """For example "fullest rank 1.02 times the average instead of 1.31, on load not used to place (b.json)"."""
        figures = f"fullest rank {self.after:.2f} times the average instead of {self.before:.2f}"
        if self.checked_on is not None:
            return f"{figures}, on load not used to place ({self.checked_on.path})"
        return (
            f"{figures} on the very load it was placed by ({self.placed_by.path}), so other traffic will be less even"
        )

    @property
    def gain(self) -> Gain | None:
        """On load that was not used to place; None where there is none."""
        if self.checked_on is None:
            return None
        source = f"tokens counted in {self.checked_on.path}, placed by {self.placed_by.path}"
        ratio = Quantity(self.before / self.after, "ratio", Source.MODELLED, source)
        return Gain(metric="tokens of the fullest rank", ratio=ratio)

    @property
    def evidence(self) -> tuple[str, ...]:
        """The files."""
        files = (self.placed_by,) if self.checked_on is None else (self.placed_by, self.checked_on)
        return tuple(f"{file.path} ({file.load.steps} steps since {file.load.since})" for file in files)


def _place(ctx: PlanContext, *, replicas: int) -> _Placed:
    import numpy as np

    from moe_optimizer.placement import imbalance, place_experts

    assert ctx.request.expert_load is not None, "nothing to place by"
    placed_by, checked_on = ctx.request.expert_load.placed_by, ctx.request.expert_load.checked_on
    load = _matrix(placed_by, ctx)
    judge = load if checked_on is None else _matrix(checked_on, ctx)
    num_experts, num_ranks = ctx.model.num_experts, ctx.parallelism.num_devices
    placement = place_experts(load, num_ranks, num_experts + replicas)
    # Sorted within a rank: some of vLLM's loaders take the experts of a rank in ascending order.
    placement = np.sort(placement.reshape(len(load), num_ranks, -1), axis=-1).reshape(placement.shape)
    named = {file.load.model for file in (placed_by, checked_on) if file is not None} - {ctx.model.name, ctx.model.path}
    return _Placed(
        placement=placement,
        before=_linear_imbalance(judge, num_ranks),
        after=imbalance(judge, placement, num_ranks),
        placed_by=placed_by,
        checked_on=checked_on,
        warnings=tuple(f"the expert load is of {name}, and the model is {ctx.model.name}" for name in sorted(named)),
    )


def _linear_imbalance(load: NDArray[np.float64], num_ranks: int) -> float:
    """Return the imbalance of experts in order, the first ranks with one more where they do not divide."""
    import numpy as np

    each, more = divmod(load.shape[1], num_ranks)
    starts = [rank * each + min(rank, more) for rank in range(num_ranks)]
    tokens = np.add.reduceat(load, starts, axis=1)
    mean = tokens.mean(axis=1).sum()
    return float(tokens.max(axis=1).sum() / mean) if mean else 1.0


def _matrix(file: LoadFile, ctx: PlanContext) -> NDArray[np.float64]:
    """Return [MoE layers, experts] tokens.

    Raises:
        InputError: the file's layers or experts are not those of the model, or it has no tokens.
    """
    import numpy as np

    load, model = file.load, ctx.model
    if load.num_experts != model.num_experts:
        raise InputError(f"{file.path}: {load.num_experts} experts, expected {model.num_experts} as {model.name} has")
    layers = tuple(layer.index for layer in load.layers)
    if layers != model.moe_layers:
        raise InputError(f"{file.path}: {_short(layers)}, expected {_short(model.moe_layers)}")
    if not any(layer.total for layer in load.layers):
        raise InputError(f"{file.path}: no tokens were counted in it", hint="serve some traffic, then take the file")
    return np.array([layer.tokens for layer in load.layers], dtype=np.float64)


def _short(layers: tuple[int, ...]) -> str:
    return f"{len(layers)} MoE layers" + (f" ({layers[0]} to {layers[-1]})" if layers else "")


def _initial_params(ctx: PlanContext, placed: _Placed) -> ExpertPlacementParams:
    rows = zip(ctx.model.moe_layers, placed.placement.tolist(), strict=True)
    experts = {layer: " ".join(map(str, row)) for layer, row in rows}
    by_name = {str(layer): row for layer, row in experts.items()}
    return ExpertPlacementParams(
        mode="initial",
        num_ranks=ctx.parallelism.num_devices,
        num_experts=ctx.model.num_experts,
        experts=experts,
        digest=hashlib.sha256(json.dumps(by_name, sort_keys=True).encode()).hexdigest()[:16],
    )
