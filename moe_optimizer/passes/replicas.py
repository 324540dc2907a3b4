"""Decides whether several whole servers share a machine, and plans them."""

from __future__ import annotations

import dataclasses

from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import ReplicasParams
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan.server_group import ServerGroup
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.routed_servers import (
    UNSAFE_FLAGS,
    plan_port,
    router_args,
    servers_behind_router,
    undividable_cpu,
    unsafe_flag,
)

_RECORD = "benchmarks/records/2026-11-21_h200_layouts.json"
_CPU_SERVERS = 2
"""On the CPU, where nobody says how many: they share one memory, so more seldom pay."""


class Replicas(OptimizationPass):
    """Whole servers that know nothing of each other, each with its share of the devices, behind a router.

    Nothing travels between them, as it does between slices of a model (TP) or experts (EP); but one request is no
    faster than a share is, and each share holds all weights. It stands before the passes that plan one of the servers.
    """

    name = "replicas"
    flag = "replicas"
    title = "whole servers behind a router, each on its share of the GPUs"
    limits = "on one machine; requests are dealt in turns, so prompts with a common beginning may meet different caches"
    no_gain = "stock vLLM is one server; the layouts are ranked among each other"

    def why_not(self, ctx: PlanContext) -> str:
        """Needs devices for two servers on one machine, and arguments that servers behind a router can have."""
        why_not = unsafe_flag(ctx, UNSAFE_FLAGS)
        if ctx.request.num_nodes > 1:
            why_not = "it divides one machine; over several, parallelism.across_nodes says what each serves"
        elif ctx.num_servers > 1:
            why_not = "disaggregation already divides the devices between its servers"
        elif ctx.device == "cpu":
            why_not = why_not or undividable_cpu(ctx, _asked(ctx) or _CPU_SERVERS)
        elif ctx.num_gpus < max(2, _asked(ctx) or 0):
            why_not = f"needs at least {max(2, _asked(ctx) or 0)} GPUs, one for each server, found {ctx.num_gpus}"
        return why_not

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the servers where they are asked for by name, or are of the chosen layout."""
        chosen = 1 if ctx.layout is None else ctx.layout.replicas
        if ctx.wish(self.name)[0] is Wish.AUTO and chosen == 1:
            why = "one server over all devices answers a request sooner; --enable-replicas asks for whole servers"
            return self.when_off(ctx, why)
        count = chosen if chosen > 1 else _asked(ctx) or _most_that_fit(ctx)
        if count == 1:
            return self.refused(ctx, f"no part of {ctx.num_gpus} GPUs holds the model by itself")
        each, idle = divmod(ctx.num_gpus if ctx.device == "cuda" else ctx.cpu.cores, count)
        unit = "GPU" if ctx.device == "cuda" else "core"
        share = f"every {each} {unit}s" if each > 1 else f"each {unit}"
        return self.decision(
            ctx,
            Status.ON,
            f"{count} servers",
            f"a whole server on {share}, and a router that deals requests to them in turns",
            Applier.SERVERS,
            evidence=(_RECORD,) if ctx.device == "cuda" else (),
            rejected=_rejected(ctx),
            params=ReplicasParams(num_servers=count),
            warnings=(f"replicas leave {idle} of {ctx.num_gpus} GPUs idle",) if idle and ctx.num_gpus else (),
        )

    def server_group(self, ctx: PlanContext, serve_args: ServeArguments) -> ServerGroup:
        """Return the servers and the router, which takes the plan's address; the servers have the ports after it.

        Raises:
            InputError: there are no such ports.
        """
        count = ctx.decided[self.name].params_as(ReplicasParams).num_servers
        port = plan_port(serve_args, ports_after=count + 1, asked_by="several servers")
        names = [f"replica-{index}" for index in range(count)]
        servers = servers_behind_router(ctx, serve_args, port, dict.fromkeys(names, 0))
        own = ServeArguments("--worker-urls", *(server.url for server in servers))
        return ServerGroup(servers=tuple(servers), router_args=own + router_args(serve_args, port, count))


def _rejected(ctx: PlanContext) -> dict[str, str]:
    """Return the next best layouts and, where servers were asked for by name, what was measured of them."""
    choice = ctx.layout_choice
    others = {} if choice is None else {each.layout: each.why_not for each in choice.estimates[1:]}
    return others if ctx.wish("replicas")[0] is Wish.AUTO else {**others, "auto": _why_not_by_auto(ctx)}


def _why_not_by_auto(ctx: PlanContext) -> str:
    if ctx.device == "cpu":
        return "no record says for which load it pays"
    return (
        "the one record has two servers slower than slices over 2 H200 (Qwen3-30B-A3B with random weights): median "
        "time per output token 4 % longer for 1 client, 10 % for 16, 25 % for 128"
    )


def _asked(ctx: PlanContext) -> int | None:
    return ctx.profile.passes.replicas.count


def _most_that_fit(ctx: PlanContext) -> int:
    """Return the most servers of which each has GPUs enough for the model; 1: it takes all of them."""
    if ctx.device == "cpu":
        return _CPU_SERVERS
    tensor, copies = ctx.asked_sizes
    for each in range((tensor or 1) * (copies or 1), ctx.num_gpus // 2 + 1):
        share = dataclasses.replace(ctx, num_gpus=each)
        if ctx.num_gpus % each == 0 and share.memory(num_devices=each).fits:
            return ctx.num_gpus // each
    return 1
