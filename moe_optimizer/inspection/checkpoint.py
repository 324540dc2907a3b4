"""Compares what a checkpoint's headers say with what its configuration says."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

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
class Stored:
    """A model's size: as its checkpoint's headers have it, else as its configuration describes it."""

    total_params: int
    """Vision and audio towers of the checkpoint included, unless they are stored packed."""
    weight_bytes: int
    expert_weight_bytes: int
    """The part of `weight_bytes` that is routed experts."""
    mtp_weight_bytes: int | None = None
    """Multi-token-prediction layers, which are in no other figure; None: a description does not know."""
    warnings: tuple[str, ...] = ()


def compare(tensors: tuple[Tensor, ...], decoder: Decoder, described: Stored, *, exact: bool) -> Stored:
    """Return the size of a checkpoint, multi-token-prediction layers left out.

    Args:
        tensors: the headers' entries.
        decoder: the model that the configuration describes.
        described: its size. It counts where weights are packed, so that elements do not count them, and where the
            files are a part of the checkpoint.
        exact: the described parameters are known, not estimated: files with fewer are a part of the checkpoint.

    Raises:
        InputError: the shape or number of the experts contradicts the configuration.
    """
    num_layers = len(decoder.layers)
    served = [tensor for tensor in tensors if not _is_extra(tensor.name, num_layers)]
    described = replace(
        described,
        mtp_weight_bytes=sum(tensor.num_bytes for tensor in tensors) - sum(tensor.num_bytes for tensor in served),
    )
    _check_experts(served, decoder)
    language = [tensor for tensor in served if not _TOWER.search(tensor.name)]
    counted = [tensor for tensor in language if not _NOT_WEIGHTS.search(tensor.name)]
    if decoder.lm_head_params == 0:
        counted = [tensor for tensor in counted if not tensor.name.endswith("lm_head.weight")]
    towers = sum(tensor.elements for tensor in served if _TOWER.search(tensor.name) and tensor.dtype in UNPACKED)
    whole = all(tensor.dtype in UNPACKED for tensor in counted)
    total = described.total_params
    params = sum(tensor.elements for tensor in counted) if whole else total
    if exact and params < total:
        note = (
            f"the weight files hold {params} of the {total} parameters that config.json describes: "
            "incomplete, the configuration counts"
        )
        return replace(described, total_params=total + towers, warnings=(note,))
    note = (
        f"the weight files hold {params} parameters of the language model, config.json describes {total}; "
        "the files count"
    )
    return replace(
        described,
        total_params=params + towers,
        weight_bytes=sum(tensor.num_bytes for tensor in served),
        expert_weight_bytes=sum(tensor.num_bytes for tensor in served if _OF_EXPERTS.search(tensor.name)),
        warnings=(note,) if params != total else (),
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
