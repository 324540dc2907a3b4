"""Chooses what drafts, and says why a way to draft cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.context import PlanContext

if TYPE_CHECKING:
    from moe_optimizer.profiles.schema import SpeculationSection

_VLLM_NAMES = {"draft": "draft_model"}
_MTP_MODELS = (
    "bailing_hybrid", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "hy_v3", "longcat_flash", "mimo", "mimo_v2_flash", "nemotron_h", "pangu_ultra_moe", "qwen3_5_moe",
    "qwen3_next", "step3p5",
)  # fmt: skip
"""Model types whose layers for multi-token prediction vLLM 0.32 drafts with, from its SpeculativeConfig. It decides
itself of others, where they are asked for."""
ASYNC_SCHEDULING = "--async-scheduling"
_AHEAD = ("mtp", "eagle3", "draft_model")
"""vLLM refuses --async-scheduling with ngram and suffix. Before 0.32 it takes it with a drafting model, but does not
choose it by itself."""
_MOST = 8
"""Chosen: more drafts than that are rarely all accepted."""
_DEFAULTS = {"ngram": 3, "suffix": 8, "eagle3": 3, "draft_model": 3}
"""Chosen: drafts of a step where nothing is known of how many are accepted."""


def method_of(ctx: PlanContext) -> tuple[str, str]:
    """Return vLLM's name of the method that is asked for, or chosen, and why it cannot be; "" where it can."""
    section: SpeculationSection = ctx.section("speculation")
    draft, model = ctx.request.draft, ctx.model
    method = section.method
    if method == "auto":
        has_own = model.mtp_layers > 0 and model.mtp_weight_bytes != 0 and model.model_type in _MTP_MODELS
        method = draft.method if draft is not None else "mtp" if has_own else "ngram"
    why_not = ""
    if method in ("eagle3", "draft"):
        if draft is None:
            why_not = f"{method} needs a drafting model: passes.speculation.model in the profile"
        elif draft.method != method:
            why_not = f"{draft.name} drafts by {draft.method}, and the profile asks for {method}"
        elif method == "draft" and draft.vocab_size != model.vocab_size:
            why_not = f"{draft.name} has {draft.vocab_size} words, {model.name} has {model.vocab_size}"
    elif method == "mtp" and not model.mtp_layers:
        why_not = "config.json states no multi-token-prediction layers"
    elif method == "mtp" and model.mtp_weight_bytes == 0:
        why_not = f"config.json states {model.mtp_layers} multi-token-prediction layers, and the weight files hold none"
    elif method == "suffix" and ctx.hardware.origin == "probed" and not ctx.software.arctic_inference:
        why_not = "needs the package arctic_inference, which is not installed here"
    return _VLLM_NAMES.get(method, method), why_not


def prepares_ahead(method: str, pinned: ServeArguments) -> bool:
    """Return whether vLLM prepares a step with drafts of this method while the GPU computes the one before.

    Args:
        method: vLLM's name.
        pinned: the user's own arguments, which may say that it does not.
    """
    return method in _AHEAD and (ASYNC_SCHEDULING not in pinned or pinned.is_on(ASYNC_SCHEDULING))


def draft_choices(ctx: PlanContext, method: str) -> Sequence[int]:
    """Return the numbers of drafts that a step may have, the largest last."""
    asked = ctx.section("speculation").draft_tokens
    most = asked or max(_MOST, ctx.model.mtp_layers if method == "mtp" else 0)
    return [number for number in range(1, most + 1) if _fits_layers(ctx, method, number)]


def default_drafts(ctx: PlanContext, method: str) -> int:
    """Return the drafts of a step as they are asked for, or chosen where no acceptance is known."""
    asked = ctx.section("speculation").draft_tokens
    return asked or (ctx.model.mtp_layers if method == "mtp" else _DEFAULTS[method])


def why_not_so_many(ctx: PlanContext, method: str) -> str:
    """Return why the asked number of drafts cannot be, "" where it can."""
    asked = ctx.section("speculation").draft_tokens
    if asked is None or _fits_layers(ctx, method, asked):
        return ""
    return f"draft_tokens {asked}: {ctx.model.mtp_layers} layers draft together, so it must be a multiple of that"


def _fits_layers(ctx: PlanContext, method: str, drafts: int) -> bool:
    """Whether vLLM takes the number: more drafts than layers are rounds of all of them."""
    layers = ctx.model.mtp_layers
    return method != "mtp" or drafts <= layers or drafts % layers == 0
