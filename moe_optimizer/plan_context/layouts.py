"""Asks the search over layouts what a request allows, and makes its answer part of the plan."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

from moe_optimizer.errors import GoalMissedError, UnsupportedError
from moe_optimizer.layouts.question import LayoutQuestion
from moe_optimizer.layouts.search import Ranking, rank, why_behind
from moe_optimizer.layouts.serving import Prediction, predict, step_tokens
from moe_optimizer.plan.decision import Status, Wish
from moe_optimizer.plan.layout_choice import LayoutChoice, LayoutEstimate, waiting_in_words
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.plan_context.allowed_layouts import allows_layout
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.expert_kernel import ours_are_decided
from moe_optimizer.plan_context.layout_question import layout_question, placed_servers
from moe_optimizer.plan_context.pinned_layout import check_pinned, refuse_without_layouts
from moe_optimizer.specs.layout import Layout, parse_layout
from moe_optimizer.specs.quantity import Quantity

_SHOWN = 5
_DIGITS = 4
_LEAST_SHOWN = 0.005


def choose_layout(ctx: PlanContext) -> LayoutChoice | None:
    """Return the layout that the goal asks for.

    None where nothing is predicted: on the CPU, inside a running vLLM, for stock vLLM, on a GPU of unknown rates, or
    where no layout fits, which the memory plan then refuses with what is missing.

    Raises:
        GoalMissedError: layouts fit, and none keeps the limits; the nearest is named.
        InputError: the pinned layout is none.
        UnsupportedError: the pinned layout is none of those that the model and the machines allow, or does not fit.
    """
    pinned = ctx.request.layout
    layout = None if pinned is None else parse_layout(pinned)
    if ctx.device == "cpu" or ctx.request.inside_vllm or ctx.request.engine != "vllm" or not ctx.num_gpus:
        if layout is not None:
            refuse_without_layouts(ctx, layout)
        return None
    if not ctx.request.search_layouts:
        return None
    try:
        question = layout_question(ctx)
        ranking = rank(question, ctx.goal, ctx.limits, allowed=lambda each: allows_layout(ctx, each, layout))
    except UnsupportedError:
        if pinned is not None:
            raise
        return None
    if layout is not None:
        check_pinned(ctx, layout, ranking, question)
    if not ranking.within and not ranking.beyond:
        return None
    if not ranking.within and layout is None:
        _refuse(ctx, ranking, question)
    return _choice(ctx, ranking, pinned="" if layout is None else f"--layout {layout.name}")


def predicted_as_decided(asked: PlanContext, decided: PlanContext, memory: MemoryPlan) -> LayoutChoice | None:
    """Return the choice with its layout predicted again, with what the passes decided of requests, steps and memory.

    The search knows of steps what the scheduler does, and nothing of what drafts tokens, of replicas of experts or of
    our kernels' buffers. Where our kernels are still to be measured, a step has no more tokens than the search takes
    it to have after that, as the layouts beside this one do.

    Args:
        asked: the context that the layout was chosen in.
        decided: the same with all decisions.
        memory: of a GPU under them; it fits.
    """
    choice = decided.layout_choice
    if choice is None:
        return None
    question, requests = layout_question(asked), decided.scheduler.max_num_seqs
    pending = decided.decided["flash_dmoe"].status is Status.PENDING
    question = dataclasses.replace(
        question,
        memory=dataclasses.replace(question.memory, max_num_seqs=requests),
        max_running=requests,
        api_servers=choice.estimate.api_servers,
        placed=placed_servers(decided, question),
        our_kernels=question.our_kernels and (pending or ours_are_decided(decided)),
        ours_where_never_slower=False,
    )
    request = decided.memory_request(**decided.memory_terms(decided.kv_cache.kv_bits))
    if pending:
        tokens = min(request.max_num_batched_tokens, step_tokens(question, choice.layout))
        request = dataclasses.replace(request, max_num_batched_tokens=tokens)
    prediction = predict(question, choice.layout, memory, request=request)
    return dataclasses.replace(
        choice,
        estimates=(_estimate(prediction, ""), *choice.estimates[1:]),
        parts_us=_parts_us(prediction),
        front_end_us=prediction.front_end_us,
        own_front_end_share=_rounded(prediction.own_front_end_share),
    )


def _refuse(ctx: PlanContext, ranking: Ranking, question: LayoutQuestion) -> NoReturn:
    nearest = ranking.beyond[0]
    apart = _apart_within(ctx, question)
    keeps = "" if apart is None else f"--enable-disaggregation keeps them ({apart.name}); else "
    raise GoalMissedError(
        f"no layout of {ctx.num_gpus * ctx.request.num_nodes} GPUs is predicted to keep the limits with {ctx.clients} "
        f"clients; the nearest, {nearest.layout.name}: {ctx.limits.why_not(nearest)}",
        hint=f"{keeps}fewer --clients, more GPUs or a higher limit; "
        f"--layout {nearest.layout.name} serves it all the same",
    )


def _apart_within(ctx: PlanContext, question: LayoutQuestion) -> Layout | None:
    """Return the best layout with prefill and decode apart that keeps the limits, where only the profile leaves those
    out; None: there is none, or the user said what is to be done with them.
    """
    if "disaggregation" in ctx.request.wishes or ctx.wish("disaggregation")[0] is not Wish.OFF:
        return None
    wishes = {**ctx.request.wishes, "disaggregation": (Wish.ON, "")}
    asked = dataclasses.replace(ctx, request=dataclasses.replace(ctx.request, wishes=wishes))
    within = rank(question, ctx.goal, ctx.limits, allowed=lambda each: allows_layout(asked, each, None)).within
    return within[0].layout if within else None


def _choice(ctx: PlanContext, ranking: Ranking, *, pinned: str) -> LayoutChoice:
    ordered = [*ranking.within, *ranking.beyond]
    chosen = ordered[0]
    return LayoutChoice(
        goal=ctx.goal,
        clients=ctx.clients,
        ttft_limit_ms=ctx.limits.ttft_ms,
        tpot_limit_ms=ctx.limits.tpot_ms,
        chosen=chosen.layout.name,
        pinned_by=pinned,
        estimates=tuple(
            _estimate(each, "" if each is chosen else _why_not(ctx, each, chosen)) for each in ordered[:_SHOWN]
        ),
        num_layouts=len(ordered) + len(ranking.do_not_fit),
        parts_us=_parts_us(chosen),
        front_end_us=chosen.front_end_us,
        own_front_end_share=_rounded(chosen.own_front_end_share),
    )


def _parts_us(prediction: Prediction) -> dict[str, Quantity]:
    return {
        name: dataclasses.replace(part, value=_rounded(part.value))
        for name, part in prediction.parts.items()
        if part.value
    }


def _estimate(prediction: Prediction, why_not: str) -> LayoutEstimate:
    return LayoutEstimate(
        layout=prediction.layout.name,
        num_gpus=prediction.layout.num_devices,
        tpot_ms=_rounded(prediction.tpot_ms),
        ttft_ms=_rounded(prediction.ttft_ms),
        tokens_per_s=_rounded(prediction.tokens_per_s),
        weight_bytes=prediction.memory.weight_bytes,
        kv_tokens=prediction.memory.kv_tokens,
        running=prediction.running,
        waiting=prediction.waiting,
        api_servers=prediction.api_servers,
        front_end_share=_rounded(prediction.front_end_share),
        reading_share=_rounded(prediction.reading_share),
        why_not=why_not,
    )


def _why_not(ctx: PlanContext, each: Prediction, chosen: Prediction) -> str:
    """Return what a layout does worse than the chosen one."""
    broken = ctx.limits.why_not(each)
    if broken:
        return broken
    if each.waiting and not chosen.waiting:
        return waiting_in_words(each.waiting, each.running, copies=each.layout.num_engines)
    slower = each.tpot_ms / chosen.tpot_ms - 1
    fewer = 1 - each.tokens_per_s / chosen.tokens_per_s
    words = [f"TPOT {slower:+.0%}"] if abs(slower) >= _LEAST_SHOWN else []
    words += [f"tokens/s {-fewer:+.0%}"] if abs(fewer) >= _LEAST_SHOWN else []
    words += ["bound by the front end"] if words and each.front_end_share == 1 else []
    behind = why_behind(each, chosen, ctx.goal)
    words += [behind] if words and behind else []
    if words:
        return ", ".join(words)
    splits = each.layout.disaggregated and not chosen.layout.disaggregated
    return "prefill and decode apart gain nothing here" if splits else "the same within 0.5 %"


def _rounded(value: float) -> float:
    """Return the digits that a prediction may claim."""
    return float(f"{value:.{_DIGITS}g}")
