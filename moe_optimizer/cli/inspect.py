"""Runs `moe-optimizer inspect`: describes a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_optimizer.cli import messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.options import ModelOptions

if TYPE_CHECKING:
    from moe_optimizer.specs.model import ModelSpec


@takes(ModelOptions)
def command(options: ModelOptions) -> messages.Output:
    """Show a model's experts, layers, parameters and attention.

    Reads config.json and the safetensors headers, never weights or code.
    """
    from moe_optimizer.inspection.model_inspector import ModelInspector, to_inspect_json

    spec = ModelInspector(trust_remote_code=options.trust_remote_code).inspect(options.model_name)
    return messages.Output(
        result=to_inspect_json(spec),
        render=lambda _: render_model(spec, width=messages.output_width()),
        notes=messages.warning_lines(spec.warnings),
    )


def render_model(spec: ModelSpec, *, width: int) -> str:
    """Return the model as two columns of text, at most `width` wide except for long words such as paths."""
    rows = [("model", spec.name), ("folder", spec.path), ("architecture", spec.architecture or "not named")]
    rows += _expert_rows(spec) if spec.is_moe else [("kind", "dense")]
    rows += [
        ("layers", f"{spec.num_layers}, hidden size {spec.hidden_size}"),
        *((("drafting", _drafting(spec)),) if spec.mtp_layers else ()),
        ("attention", _attention(spec)),
        ("parameters", f"{_scaled(spec.total_params)}, of which one token uses {_scaled(spec.active_params)}"),
        ("weights", f"{_scaled(spec.weight_bytes)}B, {_weights(spec)}"),
        ("KV cache", f"{_scaled(spec.kv_bytes_per_token)}B per token at 2 bytes an element"),
        ("longest", f"{spec.max_model_len} tokens" if spec.max_model_len else "not stated"),
        ("servable", _servable(spec)),
    ]
    return messages.two_columns(rows, width=width)


def _drafting(spec: ModelSpec) -> str:
    layers = f"{spec.mtp_layers} layer{'s' * (spec.mtp_layers > 1)} for multi-token prediction"
    if spec.mtp_weight_bytes is None:
        return f"{layers}, not counted"
    if not spec.mtp_weight_bytes:
        return f"{layers}, which the weight files lack"
    return f"{layers}, {_scaled(spec.mtp_weight_bytes)}B, not counted"


def _expert_rows(spec: ModelSpec) -> list[tuple[str, str]]:
    shared = f", {spec.num_shared_experts} shared" if spec.num_shared_experts else ""
    gated = "gated" if spec.expert_matrices == 3 else "not gated"
    layers = "every layer" if spec.num_moe_layers == spec.num_layers else f"of {spec.num_layers} layers"
    return [
        ("kind", f"mixture of experts, {spec.num_moe_layers} MoE layers ({layers})"),
        ("experts", f"{spec.num_experts} per MoE layer, {spec.top_k} used by each token{shared}"),
        (
            "one expert",
            f"{spec.expert_hidden_size} -> {spec.moe_intermediate_size}, {gated}"
            + (f", {spec.expert_activation}" if spec.expert_activation else "")
            + (", with bias" if spec.expert_has_bias else ""),
        ),
        (
            "expert share",
            f"{_scaled(spec.expert_params)} parameters, {spec.expert_params / spec.total_params:.0%} of all",
        ),
    ]


def _attention(spec: ModelSpec) -> str:
    attention = spec.attention
    if attention.kind == "none":
        return "none"
    text = f"{attention.kind}, {attention.num_heads} heads, {attention.num_kv_heads} KV heads of {attention.head_dim}"
    if attention.num_attention_layers != spec.num_layers:
        text += f", in {attention.num_attention_layers} layers"
    if attention.sliding_window:
        text += f", window {attention.sliding_window} in {attention.num_windowed_layers} layers"
    return text


def _weights(spec: ModelSpec) -> str:
    if spec.quant_method is None:
        return spec.dtype
    return f"{spec.quant_method} at {spec.weight_bits:g} bits, the rest {spec.dtype}"


def _servable(spec: ModelSpec) -> str:
    answer = {True: "yes", False: "no", None: "unknown"}[spec.servable]
    if spec.servable and spec.needs_remote_code:
        answer += ", with --trust-remote-code"
    return f"{answer}: {spec.servable_reason}" if spec.servable_reason else answer


def _scaled(count: float) -> str:
    """Three digits with a decimal prefix: 30.5 G."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} "
