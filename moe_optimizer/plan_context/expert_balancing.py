"""Finds the way in which experts can be placed: once at the start, or by vLLM's load balancer (EPLB)."""

from __future__ import annotations

from moe_optimizer.errors import InputError
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.pass_params import ParallelismParams
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.specs.eplb_models import EPLB_ARCHITECTURES

_EPLB_METHODS = (None, "fp8")
"""Checkpoints whose experts vLLM's EPLB was seen to move in its source: unquantised and FP8."""
_EPLB_CONFIG, _REPLICAS_KEY = "--eplb-config", "num_redundant_experts"
_POSITIONAL_MODELS = ("gpt_oss",)
"""Model types whose vLLM loader takes the experts of a rank by position, whatever the expert map says."""


def load_balancer_runs(ctx: PlanContext) -> bool:
    """Return whether the plan will have vLLM's load balancer whatever computes the experts."""
    divided = ctx.model.is_moe and ctx.parallelism.expert_parallel and ctx.parallelism.num_devices > 1
    if not divided or why_no_load_balancer(ctx):
        return False
    if "--enable-eplb" not in ctx.pinned and ctx.wish("expert_placement")[0] is Wish.OFF:
        return False
    return load_balancer_asked(ctx, _why_not_at_the_start(ctx, ctx.parallelism))


def why_not_placed(ctx: PlanContext, split: ParallelismParams, *, ours: bool) -> str:
    """Return why the experts of a server cannot be placed by their load, or "".

    Args:
        ctx: what the plan is made from.
        split: the server: the planned one, or one that is compared with others.
        ours: whether our kernel computes its experts.
    """
    if ctx.device == "cuda" and ctx.num_gpus < 2:
        return "needs at least 2 GPUs, found 1"
    if not split.expert_parallel:
        unit = "GPU" if ctx.device == "cuda" else "process"
        needed = "needs expert parallelism (--enable-expert-parallel)"
        return f"{needed}; without it every {unit} has a slice of every expert"
    if balances_while_serving(ctx, split, ours=ours):
        return why_no_load_balancer(ctx)
    if ctx.request.expert_load is None:
        return "needs the load of the experts: serve with --enable-expert-load, then --expert-load FILE"
    return _why_no_initial(ctx, split, ours=ours)


def balances_while_serving(ctx: PlanContext, split: ParallelismParams, *, ours: bool) -> bool:
    """Return whether vLLM's load balancer is the way to place the experts of a server; see `why_not_placed`."""
    return load_balancer_asked(ctx, _why_no_initial(ctx, split, ours=ours))


def load_balancer_asked(ctx: PlanContext, why_not_initial: str) -> bool:
    """Return whether vLLM's load balancer is the way: it was asked for, by its own flag or with replicas, or it is the
    only one for a pass that was asked for by name.

    Args:
        ctx: what the plan is made from.
        why_not_initial: why experts cannot be placed at the start, or "".
    """
    if "--enable-eplb" in ctx.pinned:
        return ctx.pinned.is_on("--enable-eplb")
    if ctx.device == "cpu":
        return False
    if ctx.section("expert_placement").redundant_experts:
        return True
    return ctx.wish("expert_placement")[0] is Wish.ON and bool(why_not_initial or ctx.request.expert_load is None)


def given_replicas(ctx: PlanContext) -> int | None:
    """Return the replicas of each MoE layer by the user's own --eplb-config; None: it is not given.

    Raises:
        InputError: it is no such configuration, or the GPUs cannot get as many experts each.
    """
    text = ctx.pinned.value(_EPLB_CONFIG)
    if text is None:
        return None
    config = ctx.pinned.json_object(_EPLB_CONFIG)
    if config is None:
        raise InputError(f"{_EPLB_CONFIG}: got {text!r:.80}, expected a JSON object")
    replicas = config.get(_REPLICAS_KEY, 0)
    where = f"{_EPLB_CONFIG}: {_REPLICAS_KEY}: got {replicas!r:.80}"
    if type(replicas) is not int or replicas < 0:
        raise InputError(f"{where}, expected a whole number of at least 0")
    experts, ranks = ctx.model.num_experts, ctx.parallelism.num_devices
    if (experts + replicas) % ranks:
        raise InputError(f"{where}, expected {experts} experts and the replicas to divide by {ranks} GPUs")
    return replicas


def why_no_load_balancer(ctx: PlanContext) -> str:
    """Return why vLLM's load balancer cannot run, or ""."""
    if ctx.device == "cpu":
        return "vLLM's EPLB is CUDA only"
    if ctx.model.quant_method not in _EPLB_METHODS:
        return f"vLLM's EPLB: experts in {ctx.model.quant_method} were not looked at"
    if ctx.model.architecture not in EPLB_ARCHITECTURES:
        named = ctx.model.architecture or "its class of this model"
        return f"vLLM's EPLB: {named} is not known to have the interface that it needs (MixtureOfExperts)"
    return ""


def _why_no_initial(ctx: PlanContext, split: ParallelismParams, *, ours: bool) -> str:
    """Return why the plugin cannot place the experts before they are loaded, or ""."""
    why_not = _why_not_at_the_start(ctx, split)
    if not why_not and not ours:
        why_not = "only our expert kernel was shown to follow the expert map, and flash_dmoe is not on"
    return why_not


def _why_not_at_the_start(ctx: PlanContext, split: ParallelismParams) -> str:
    """Return the same, whatever computes them."""
    if split.data_parallel_size > 1:
        return "with data parallelism tokens are sent to ranks by expert number; needs vLLM's EPLB"
    if ctx.model.model_type in _POSITIONAL_MODELS:
        return f"vLLM loads the experts of {ctx.model.model_type} by position"
    if ctx.model.num_experts % split.num_devices:
        return f"{ctx.model.num_experts} experts do not divide by {split.num_devices}"
    strategy = ctx.pinned.value("--expert-placement-strategy") or "linear"
    if strategy != "linear":
        return f"--expert-placement-strategy {strategy} is given"
    if ctx.pinned.is_on("--enable-ep-weight-filter"):
        return "--enable-ep-weight-filter leaves out weights by expert number"
    return ""
