"""Answers how many API servers a server may have: vLLM's processes that take requests in and send tokens out."""

from __future__ import annotations

from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan_context.context import PlanContext

FLAG = "--api-server-count"
MOST_FOR_AN_ENGINE = 4
"""Chosen: as many as were run for one engine."""
_ONE_ONLY = {
    "--data-parallel-rank": "starts one for each copy",
    "--data-parallel-external-lb": "starts one for each copy",
    "--data-parallel-start-rank": "starts one for each copy of a machine",
    "--data-parallel-hybrid-lb": "starts one for each copy of a machine",
    "--enable-elastic-ep": "works with one only",
    "--enable-lora": "an adapter that is loaded while serving is known to the one API server that was asked",
}
"""Arguments of the user's that vLLM does not take several API servers with, or that would not work with them."""


def asked_api_servers(ctx: PlanContext) -> tuple[int | None, str]:
    """Return how many API servers of each server somebody asks for, and who; (None, ""): nobody."""
    given = ctx.pinned.count(FLAG)
    if given is not None:
        return given, f"given after -- ({FLAG})"
    asked = ctx.section("api_servers").count
    return (None, "") if asked is None else (asked, f"as {ctx.profile_origin} asks")


def why_one_api_server(ctx: PlanContext) -> str:
    """Return why no API servers are added to those that vLLM starts by itself, or ""."""
    if ctx.device == "cpu":
        return "for GPUs: the CPU build is started without vLLM's command, which alone starts several"
    return next((f"{flag} is given after --: {why}" for flag, why in _ONE_ONLY.items() if ctx.pinned.is_on(flag)), "")


def api_servers_of_engine(ctx: PlanContext) -> range:
    """Return the numbers of API servers for each engine that a plan may take where nobody asks for one."""
    wish, _ = ctx.wish("api_servers")
    if wish is Wish.OFF or why_one_api_server(ctx):
        return range(1, 2)
    return range(1 + (wish is Wish.ON), MOST_FOR_AN_ENGINE + 1)
