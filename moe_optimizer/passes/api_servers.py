"""Chooses how many processes of a server take requests in and send tokens out."""

from __future__ import annotations

from moe_optimizer.layouts.constants import FRONT_END_PROMPT_TOKEN_US, FRONT_END_TOKEN_US, LAYOUTS
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.layout_choice import LayoutEstimate
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.api_servers import FLAG, asked_api_servers, why_one_api_server
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.specs.layout import parse_layout


class ApiServers(OptimizationPass):
    """How many API servers each server has.

    vLLM's API server is one process: it reads requests, makes tokens of their prompts and text of the tokens of their
    answers, for all requests of an engine. Where that is predicted to take longer than the engine's steps, several of
    them share the port. vLLM itself starts one for each data parallel copy of a machine, and no more.
    Stands after parallelism, because the layout decides how many requests an engine has.
    """

    name = "api_servers"
    flag = "api-servers"
    title = "several API servers where one is too slow for the engine"
    limits = "what a prompt and an answer take in an API server was measured with one tokenizer only"
    no_gain = "the layouts are ranked with it: see theirs"

    def why_not(self, ctx: PlanContext) -> str:
        """On GPUs, where no argument of the user's is against it."""
        return why_one_api_server(ctx)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the number that the layout was predicted with, or that somebody asks for."""
        asked, why = asked_api_servers(ctx)
        estimate = None if ctx.layout_choice is None else ctx.layout_choice.estimate
        if asked is not None:
            return self._several(ctx, asked, why)
        if estimate is None:
            return self.refused(ctx, "nothing is predicted of this machine")
        copies = ctx.parallelism.data_parallel_size
        each = f"one for each of {copies} copies" if copies > 1 else "one"
        busy = f"{estimate.front_end_share:.0%} of the time"
        if estimate.api_servers <= copies:
            return self.refused(ctx, f"{each} is predicted to be busy {busy}")
        wish, origin = ctx.wish(self.name)
        why = f"asked for by {origin}" if wish is Wish.ON else _too_busy(ctx, estimate)
        return self._several(ctx, estimate.api_servers, f"{why}; each of these is predicted to be busy {busy}")

    def _several(self, ctx: PlanContext, count: int, reason: str) -> Decision:
        return self.decision(
            ctx,
            Status.ON,
            f"{count} API server{'s' if count > 1 else ''}",
            reason,
            Applier.FLAGS,
            evidence=(LAYOUTS,),
            vllm_args=ServeArguments(FLAG, str(count)),
        )


def _too_busy(ctx: PlanContext, estimate: LayoutEstimate) -> str:
    """Return what one API server sends out at most, where requests are as long as planned, and what is to be sent."""
    prompt, answer = ctx.workload.input_tokens, ctx.workload.output_tokens
    most = answer / (FRONT_END_PROMPT_TOKEN_US * prompt + FRONT_END_TOKEN_US * answer) * 1e6
    engines = parse_layout(estimate.layout).num_engines
    return f"one lets {most:,.0f} tokens/s through, and an engine writes {estimate.tokens_per_s / engines:,.0f}"
