"""Writes the bundled model with its experts in INT4 as GPTQ, AWQ and compressed-tensors publish theirs.

The scales have three significant bits, so that BF16 holds every weight exactly: `dequantized` is the same model.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TINY_MOE = Path(__file__).resolve().parents[1] / "examples" / "tiny-moe"
Form = Literal["gptq", "awq", "compressed-tensors", "dequantized"]
_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_LEFT_ALONE = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]


def write_int4(
    folder: Path,
    form: Form,
    *,
    group: int = 64,
    zero_points: bool = False,
    act_order: bool = False,
    negated: bool = False,
) -> Path:
    """Write a checkpoint and return its folder.

    Args:
        folder: is made.
        form: as which method stores it, or in BF16.
        group: columns that share a scale.
        zero_points: with one for each group; not "gptq", of which vLLM reads the symmetric kind alone.
        act_order: the file says that the columns of a group are anywhere in the row; they are not.
        negated: with the experts' weights negated, which is another model.
    """
    ignored = shutil.ignore_patterns("*.safetensors", "*.index.json", "config.json", "*.md", "*.txt")
    shutil.copytree(TINY_MOE, folder, ignore=ignored)
    config = json.loads((TINY_MOE / "config.json").read_text())
    if form != "dequantized":
        config["quantization_config"] = scheme(form, group=group, zero_points=zero_points, act_order=act_order)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors: dict[str, Tensor] = {}
    for path in sorted(TINY_MOE.glob("*.safetensors")):
        for name, weight in load_file(path).items():
            if _EXPERT.fullmatch(name):
                tensors |= stored(
                    name.removesuffix(".weight"), form, *quantized(-weight if negated else weight, group, zero_points)
                )
            else:
                tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def scheme(form: Form, *, group: int, zero_points: bool, act_order: bool = False) -> dict[str, Any]:
    """Return what config.json says of it."""
    if form == "gptq":
        return {
            "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": act_order, "sym": not zero_points,
            "lm_head": False, "dynamic": {r"-:.*self_attn.*": {}, r"-:.*mlp\.gate$": {}},
        }  # fmt: skip
    if form == "awq":
        return {
            "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zero_points, "version": "gemm",
            "modules_to_not_convert": ["self_attn", "mlp.gate", "lm_head"],
        }  # fmt: skip
    weights = {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": not zero_points,
        "actorder": "group" if act_order else None, "dynamic": False, "observer": "minmax",
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None,
                                      "output_activations": None}},
        "ignore": _LEFT_ALONE,
    }  # fmt: skip


def quantized(weight: Tensor, group: int, zero_points: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [N, K], scales [N, K / group] of three significant bits and zero points [N, K / group]."""
    groups = weight.float().unflatten(-1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    wanted = (high - low) / 15 if zero_points else groups.abs().amax(-1) / 7
    mantissa, exponent = torch.frexp(wanted.clamp(min=1e-6))
    scale = torch.ldexp((mantissa * 8).ceil() / 8, exponent)
    zero = (-low / scale).round().clamp(0, 15) if zero_points else torch.full_like(scale, 8)
    codes = (groups / scale.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, 15)
    return codes.flatten(-2).int(), scale.bfloat16(), zero.int()


def stored(name: str, form: Form, codes: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    """Return a matrix under the names of a method."""
    group = codes.shape[1] // scale.shape[1]
    symmetric = bool((zero == 8).all())
    if form == "dequantized":
        groups = codes.unflatten(-1, (-1, group)) - zero.unsqueeze(-1)
        dense = (groups * scale.float().unsqueeze(-1)).flatten(-2)
        assert torch.equal(dense.bfloat16().float(), dense), "BF16 was to hold it exactly"
        return {f"{name}.weight": dense.bfloat16()}
    if form == "gptq":
        parts = {
            "qweight": packed(codes.T.contiguous(), dim=0), "qzeros": packed((zero - 1).T.contiguous(), dim=1),
            "scales": scale.T.contiguous(), "g_idx": (torch.arange(codes.shape[1]) // group).int(),
        }  # fmt: skip
    elif form == "awq":
        parts = {
            "qweight": packed(codes.T.contiguous(), dim=1, order=_AWQ_ORDER),
            "qzeros": packed(zero.T.contiguous(), dim=1, order=_AWQ_ORDER), "scales": scale.T.contiguous(),
        }  # fmt: skip
    else:
        parts = {
            "weight_packed": packed(codes, dim=1), "weight_scale": scale, "weight_shape": torch.tensor(codes.shape),
        }  # fmt: skip
        parts |= {} if symmetric else {"weight_zero_point": packed(zero, dim=0)}
    return {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}


def packed(codes: Tensor, *, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return int32 words of eight codes along a dimension, the one that `order` names first in the lowest bits."""
    columns = codes if dim == 1 else codes.T
    words = torch.zeros(columns.shape[0], columns.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        words |= columns[:, column::8].long() << (4 * place)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return (words if dim == 1 else words.T).contiguous()
