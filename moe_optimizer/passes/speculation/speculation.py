"""Decides whether steps check drafted tokens, what drafts them, and how many."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.passes.speculation.method import (
    ASYNC_SCHEDULING,
    default_drafts,
    draft_choices,
    method_of,
    why_not_so_many,
)
from moe_optimizer.passes.speculation.step_costs import StepCosts
from moe_optimizer.plan.decision import Applier, Decision, Gain, Status, Wish
from moe_optimizer.plan.pass_params import SpeculationParams
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.specs.quantity import Quantity, Source

_FLAG = "--speculative-config"
_SHOWN_REQUESTS = (1, 4, 16, 64, 256)
_LEAST_GAIN = 1.03
"""Chosen: less than the prediction can tell."""
_LONGEST_MATCH, _SHORTEST_MATCH = 4, 2
"""Chosen: tokens that must repeat before ngram drafts what followed them."""

_Ranges = tuple[tuple[int, int, int], ...]


class Speculation(OptimizationPass):
    """Tokens are drafted by something cheap, and one step of the model checks all of them.

    The answers are those of the model alone: vLLM keeps a draft only where the model agrees, for sampling by rejection.
    What it brings depends on how often that is, which only the traffic can say. So it is off until it is asked for,
    or until the profile states the acceptance that was measured.
    """

    name = "speculation"
    flag = "speculation"
    title = "draft several tokens, check them in one step"
    limits = (
        "pays only where enough drafts are accepted: a step that checks drafts reads more experts, and can lose; vLLM "
        "then refuses requests with min_p or logit_bias; not with disaggregation or pipeline stages"
    )
    no_gain = "how many drafts are accepted on this traffic is not known"

    def why_not(self, ctx: PlanContext) -> str:
        """Needs something that drafts, and steps that one server computes at once."""
        if _FLAG in ctx.pinned:
            return f"{_FLAG} is given after --, and vLLM carries that out"
        if ctx.decided["disaggregation"].status is Status.ON:
            return "was not run with disaggregation"
        if ctx.parallelism.pipeline_parallel_size > 1:
            return "was not run with pipeline stages"
        method, why_not = method_of(ctx)
        return why_not or why_not_so_many(ctx, method)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the method and its drafts where they are asked for, or are predicted to win."""
        method, _ = method_of(ctx)
        wish, origin = ctx.wish(self.name)
        acceptance = ctx.section(self.name).acceptance
        costs = _costs(ctx, method)
        evidence = () if costs is None else _break_even(ctx, costs, default_drafts(ctx, method))
        if acceptance is None or costs is None:
            if wish is not Wish.ON:
                unknown = (
                    "what a step costs on this device is not modelled"
                    if costs is None and acceptance is not None
                    else "how many drafts are accepted on this traffic is not known (passes.speculation.acceptance)"
                )
                return self._off(ctx, f"{unknown}; --enable-speculation tries {method}", evidence)
            drafts = default_drafts(ctx, method)
            return self._on(ctx, method, drafts, (), f"asked for by {origin}", evidence=evidence)
        ranges = _ranges(ctx, costs, draft_choices(ctx, method), acceptance)
        running = _running(ctx)
        drafts = next(number for first, last, number in ranges if first <= running <= last)
        speed_up = costs.speed_up(running, drafts, acceptance)
        said = f"acceptance {acceptance:g} of {ctx.profile_origin}: {speed_up:.2f}x at {running} requests"
        if wish is not Wish.ON and speed_up < _LEAST_GAIN:
            return self._off(ctx, f"{said}, with the best number of drafts", evidence)
        most = max(number for _, _, number in ranges) or default_drafts(ctx, method)
        # Under data parallelism vLLM drops what depends on the number of requests.
        single = ctx.parallelism.data_parallel_size > 1 or len(ranges) == 1
        most = (drafts or most) if single else most
        ratio = Quantity(costs.speed_up(running, most if single else drafts, acceptance), "x", Source.MODELLED, said)
        gain = Gain(metric=f"tokens/s at {running} requests", ratio=ratio)
        return self._on(ctx, method, most, () if single else ranges, said, evidence=evidence, gain=gain)

    def _off(self, ctx: PlanContext, reason: str, evidence: tuple[str, ...]) -> Decision:
        return self.decision(ctx, Status.OFF, "off", reason, Applier.NONE, evidence=evidence)

    def _on(self, ctx: PlanContext, method: str, drafts: int, ranges: _Ranges, reason: str, **fields: Any) -> Decision:
        draft = ctx.request.draft if method in ("eagle3", "draft_model") else None
        config: dict[str, Any] = {"method": method, "num_speculative_tokens": drafts}
        if ranges:
            config["num_speculative_tokens_per_batch_size"] = [list(each) for each in ranges]
        if draft is not None:
            config["model"] = draft.path
        if method == "ngram":
            config |= {"prompt_lookup_max": _LONGEST_MATCH, "prompt_lookup_min": _SHORTEST_MATCH}
        weights, cache = (0, 0) if draft is None else (draft.weight_bytes, draft.kv_bytes_per_token)
        warnings: tuple[str, ...] = ()
        gain = fields.get("gain")
        if gain is not None and gain.ratio.value < 1:
            warnings += (f"speculation: predicted to lose, {gain.ratio.value:.2f}x: {reason}",)
        if method == "mtp":
            weights = ctx.model.mtp_weight_bytes or 0
            cache = round(ctx.model.kv_bytes_per_token * ctx.model.mtp_layers / ctx.model.num_layers)
        if method not in ("ngram", "suffix") and not weights:
            warnings += ("speculation: the memory plan does not count what drafts: its weight files are not here",)
        arguments = ServeArguments(_FLAG, json.dumps(config))
        if method == "draft_model" and ctx.device == "cuda" and ASYNC_SCHEDULING not in ctx.pinned:
            arguments += ServeArguments(ASYNC_SCHEDULING)
        by_requests = f", by the number of requests: {_shown(ranges)}" if ranges else ""
        return self.decision(
            ctx,
            Status.ON,
            f"{method}, {drafts} drafts{' at most' if ranges else ''}",
            reason + by_requests,
            Applier.FLAGS,
            vllm_args=arguments,
            params=SpeculationParams(
                method=method,
                draft_tokens=drafts,
                by_requests=ranges,
                weight_bytes=weights,
                kv_bytes_per_token=cache,
            ),
            warnings=warnings,
            **fields,
        )


def _costs(ctx: PlanContext, method: str) -> StepCosts | None:
    """Return what steps cost; None where the rates of the device are not known."""
    if ctx.device == "cpu":
        return None
    try:
        return StepCosts(ctx, method, ctx.request.draft if method in ("eagle3", "draft_model") else None)
    except UnsupportedError:
        return None


def _running(ctx: PlanContext) -> int:
    """Return the requests that one engine decodes at once under the planned load."""
    engines = ctx.num_servers * ctx.parallelism.data_parallel_size
    return min(ctx.workload.batch_size, math.ceil(ctx.clients / engines))


def _break_even(ctx: PlanContext, costs: StepCosts, drafts: int) -> tuple[str, ...]:
    ratios = {count: costs.ratio(count, drafts) for count in _SHOWN_REQUESTS if count <= ctx.workload.batch_size}
    times = " / ".join(f"{ratio:.2f}x" for ratio in ratios.values())
    least = " / ".join(f"{ratio - 1:.2f}" for ratio in ratios.values())
    return (
        f"with {' / '.join(map(str, ratios))} requests a step with {drafts} drafts is predicted to take {times} of a "
        f"plain one: it pays from {least} accepted drafts a step on",
    )


def _ranges(ctx: PlanContext, costs: StepCosts, choices: Sequence[int], acceptance: float) -> _Ranges:
    """Return the best number of drafts for every number of requests, judged at the powers of two."""
    most = ctx.workload.batch_size
    starts = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    best = [(start, costs.best(start, choices, acceptance)) for start in starts]
    alike = [next(group) for _, group in itertools.groupby(best, key=lambda each: each[1])]
    ends = [start - 1 for start, _ in alike[1:]] + [most]
    return tuple((start, end, drafts) for (start, drafts), end in zip(alike, ends, strict=True))


def _shown(ranges: _Ranges) -> str:
    return ", ".join(f"{first} to {last}: {drafts}" for first, last, drafts in ranges)
