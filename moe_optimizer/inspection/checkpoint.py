"""Compares what a checkpoint's headers say with what its configuration says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.safetensors_header import Tensor
from moe_optimizer.inspection.shapes import Decoder

FLOATS = ("F32", "F16", "BF16")
UNPACKED = (*FLOATS, "F8_E4M3", "F8_E5M2")
"""Types that store one weight in one element."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.(\w+)\.weight$")
_OF_EXPERTS = re.compile(
    r"\.experts\.|\.(?:block_sparse_moe|mlp)\.(?:in|out)put_linear\.|\.moe\.(?:gate|up|down)_proj\."
)
"""Weights of routed experts: Granite and JetMoE, and Step, keep all experts of a layer in tensors of other names."""
_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)(?:\.weight)?$")
_TOWER = re.compile(
    r"(?:^|\.)(?:visual|vision\w*|vit\w*|image_\w+|audio\w*|multi_modal_projector|mm_projector|sound\w*|talker|code2wav"
    r"|patch_merge_mlp|embed_vision|embed_audio|merger)\."
)
_NOT_WEIGHTS = re.compile(
    r"(?:rotary_emb\.inv_freq|\.attn\.masked_bias|\.attn\.bias|_scale_inv|_scale|\.scales|\.qzeros)$"
)
_UP = ("gate_proj", "up_proj", "w1", "w3")
_DOWN = ("down_proj", "w2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The sums over a checkpoint's headers, multi-token-prediction layers left out."""

    weight_bytes: int
    expert_weight_bytes: int
    tower_params: int
    """Parameters of vision and audio towers; 0 when they are stored packed."""
    language_params: int | None
    """Parameters of the language model; None when some weights are packed and elements do not count them."""
    incomplete: bool
    """Fewer parameters than the model is known to have: the sums are those of a part."""
    warnings: tuple[str, ...]


def compare(tensors: tuple[Tensor, ...], decoder: Decoder, total_params: int, *, exact: bool) -> Checkpoint:
    """Return a checkpoint's sums.

    Args:
        tensors: the headers' entries.
        decoder: the model that the configuration describes.
        total_params: its parameters.
        exact: they are known, not estimated: files with fewer are a part of the checkpoint.

    Raises:
        InputError: the shape or number of the experts contradicts the configuration.
    """
    num_layers = len(decoder.layers)
    served = [tensor for tensor in tensors if not _is_extra(tensor.name, num_layers)]
    _check_experts(served, decoder)
    towers = [tensor for tensor in served if _TOWER.search(tensor.name)]
    language = [tensor for tensor in served if not _TOWER.search(tensor.name)]
    counted = [tensor for tensor in language if not _NOT_WEIGHTS.search(tensor.name)]
    if decoder.lm_head_params == 0:
        counted = [tensor for tensor in counted if not tensor.name.endswith("lm_head.weight")]
    whole = all(tensor.dtype in UNPACKED for tensor in counted)
    params = sum(tensor.elements for tensor in counted) if whole else None
    warnings: tuple[str, ...] = ()
    incomplete = exact and params is not None and params < total_params
    if incomplete:
        warnings = (
            f"the weight files hold {params} of the {total_params} parameters that config.json describes: "
            "incomplete, the configuration counts",
        )
    elif params is not None and params != total_params:
        warnings = (
            f"the weight files hold {params} parameters of the language model, config.json describes {total_params}; "
            "the files count",
        )
    return Checkpoint(
        weight_bytes=sum(tensor.num_bytes for tensor in served),
        expert_weight_bytes=sum(tensor.num_bytes for tensor in served if _OF_EXPERTS.search(tensor.name)),
        tower_params=sum(tensor.elements for tensor in towers if tensor.dtype in UNPACKED),
        language_params=None if incomplete else params,
        incomplete=incomplete,
        warnings=warnings,
    )


def _is_extra(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to a multi-token-prediction layer."""
    if name.startswith(("mtp.", "model.mtp.", "mtp_", "model.mtp_")) or ".mtp." in name:
        return True
    match = None if _TOWER.search(name) else _LAYER.search(name)
    return match is not None and int(match.group(1)[:9]) >= num_layers


def _check_experts(tensors: list[Tensor], decoder: Decoder) -> None:
    found: dict[int, set[int]] = {}
    for tensor in tensors:
        match = _EXPERT.search(tensor.name)
        layer = _LAYER.search(tensor.name)
        if layer is None or (match is None and not _FUSED.search(tensor.name)) or _TOWER.search(tensor.name):
            continue
        experts = decoder.layers[int(layer.group(1))].experts
        if experts is None:
            raise InputError(f"{tensor.name}: config.json says that layer {layer.group(1)} has no experts")
        if match is None:
            if tensor.shape[:1] != (experts.num_experts,):
                raise _contradiction(tensor, "experts", tensor.shape[0] if tensor.shape else 0, experts.num_experts)
            continue
        found.setdefault(int(layer.group(1)), set()).add(int(match.group(1)[:9]))
        if tensor.dtype in UNPACKED and len(tensor.shape) == 2:
            up, width, hidden = match.group(2) in _UP, experts.intermediate_size, experts.hidden_size
            want = (width, hidden) if up else (hidden, width) if match.group(2) in _DOWN else tensor.shape
            if tensor.shape != want:
                raise _contradiction(tensor, "shape", list(tensor.shape), list(want))
    for layer, ids in found.items():
        experts = decoder.layers[layer].experts
        if experts is not None and len(ids) != experts.num_experts:
            raise InputError(
                f"config.json: layer {layer} has {experts.num_experts} experts, the weight files hold {len(ids)}",
                hint="is this config.json the one that belongs to the weights?",
            )


def _contradiction(tensor: Tensor, what: str, got: object, expected: object) -> InputError:
    return InputError(
        f"{tensor.name}: {what}: got {got}, expected {expected} from config.json",
        hint="is this config.json the one that belongs to the weights?",
    )
