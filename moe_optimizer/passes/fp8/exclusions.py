"""Lists what FP8 leaves in the checkpoint's type: parts by name, and layers by name or by their measured change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moe_optimizer.costs.weights import DTYPE_BYTES
from moe_optimizer.errors import InputError
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.layer_sensitivity import layers_over_budget

if TYPE_CHECKING:
    from moe_optimizer.profiles.schema import Fp8Section

_ALWAYS_EXCLUDED = ("router", "embeddings", "lm_head")
# vLLM matches them against the names of its modules, from the start. The input embedding and the head are no
# modules that its online quantisation looks at.
_IGNORED = {
    "router": r"re:.*\.(\w+_)?(gate|router)$",
    "attention": r"re:.*\.(self_attn|self_attention|attention|attn|linear_attn)\.",
    "shared_experts": r"re:.*\.(shared_expert|shared_experts|shared_mlp)\.",
}


def excluded_parts(ctx: PlanContext) -> Mapping[str, str]:
    """Return what stays in the checkpoint's type whatever the profile says, and what the profile adds."""
    excluded = {
        "router": "a changed choice of experts costs more than its few bytes",
        "embeddings and head": "looked up, or read once a step; their errors reach every token's logits",
    }
    added = [each for each in ctx.profile.passes.fp8.keep_bf16_layers if each not in _ALWAYS_EXCLUDED]
    return excluded | ({", ".join(added): f"kept by {ctx.profile_origin}"} if added else {})


def excluded_layers(ctx: PlanContext, *, experts: bool) -> tuple[int, ...]:
    """Return the decoder layers that stay as they are: those named, and where experts are converted those over budget.

    Raises:
        InputError: the model has no such layer, or the measurement is of something else.
    """
    parts = ctx.profile.passes.fp8.keep_bf16_layers
    named = {int(part.removeprefix("layers.")) for part in parts if part.startswith("layers.")}
    if named and max(named) >= ctx.model.num_layers:
        raise InputError(
            f"fp8.keep_bf16_layers ({ctx.profile_origin}): got layers.{max(named)}, "
            f"expected at most layers.{ctx.model.num_layers - 1}: {ctx.model.name} has {ctx.model.num_layers} layers"
        )
    return tuple(sorted(named | (_over_budget(ctx) if experts else set())))


def _over_budget(ctx: PlanContext) -> set[int]:
    """Return the layers whose measured change is larger than the profile allows."""
    section = ctx.profile.passes.fp8
    return layers_over_budget(
        ctx,
        ctx.request.fp8_sensitivity,
        pass_name="fp8",
        weights=f"fp8_{section.granularity}",
        most=section.max_layer_error,
    )


def max_error_while_loading(ctx: PlanContext) -> float | None:
    """Return by how much FP8 may change a layer that the plugin converts, which it measures while it loads; None: not
    measured there, because nothing bounds it, or the layers are decided on by a measurement on text.
    """
    section = ctx.profile.passes.fp8
    return section.max_layer_error if ctx.device == "cpu" and ctx.request.fp8_sensitivity is None else None


def stored_bits(
    ctx: PlanContext, layers: tuple[int, ...], *, experts: bool, linears: bool, padding: float = 1.0
) -> tuple[float | None, float | None]:
    """Return the bits of an expert weight and of another matrix weight, on average over what is converted and what
    stays; None for a part of which nothing is converted.

    Args:
        ctx: what the plan is made from.
        layers: decoder layers that stay.
        experts: whether the other experts are converted.
        linears: whether the other matrices are.
        padding: how many times a converted expert's weights are stored.
    """
    model, excluded = ctx.model, set(layers)
    whole = 8 * DTYPE_BYTES[ctx.dtype]
    moe, dense = set(model.moe_layers), set(range(model.num_layers)) - set(model.moe_layers)
    excluded_moe, excluded_dense = (len(excluded & each) / len(each) if each else 0.0 for each in (moe, dense))
    expert_bits = whole * excluded_moe + 8 * padding * (1 - excluded_moe)
    named = ctx.profile.passes.fp8.keep_bf16_layers
    shares = (
        (model.attention_params, 1.0 if "attention" in named else len(excluded) / model.num_layers),
        (model.shared_expert_params, 1.0 if "shared_experts" in named else excluded_moe),
        (model.dense_params, excluded_dense),
    )
    total = sum(params for params, _ in shares)
    staying = sum(params * share for params, share in shares) / total if total else 0.0
    linear_bits = whole * staying + 8 * (1 - staying)
    return expert_bits if experts else None, linear_bits if linears else None


def ignored_modules(section: Fp8Section, layers: tuple[int, ...]) -> list[str]:
    """Return vLLM's patterns of the modules that stay as they are."""
    parts = dict.fromkeys((*_ALWAYS_EXCLUDED, *section.keep_bf16_layers))
    named = [_IGNORED[part] for part in parts if part in _IGNORED]
    return [*named, *(rf"re:.*\.layers\.{layer}\." for layer in layers)]
