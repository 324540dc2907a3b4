"""Writes the bundled model with its experts in FP8, in the files of each method that people publish such models in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TINY_MOE = Path(__file__).resolve().parents[1] / "examples" / "tiny-moe"
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_BLOCK = 128
_INPUT_SCALE = 0.05
"""Of activations up to 22, which those of the bundled model stay below."""
_KEPT = [f"model.layers.{layer}.{part}" for layer in range(4)
         for part in ("mlp.gate", *(f"self_attn.{name}_proj" for name in "qkvo"))]  # fmt: skip
_PATTERNS = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]


@dataclass(frozen=True)
class Form:
    """How one kind of checkpoint stores an expert's matrix, and what its configuration says."""

    scales: str
    """"block", "channel" or "tensor"."""
    config: Mapping[str, Any]
    scale_name: str = "weight_scale"
    static: bool = False
    """Whether it has scales of the activations."""
    flat: bool = False
    """Whether the scales of channels are a vector."""


def _compressed_tensors(strategy: str, inputs: str, *, dynamic: bool = True, **weights: Any) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    activations = number | {"strategy": inputs, "dynamic": dynamic}
    if inputs == "group":
        activations["group_size"] = _BLOCK
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": strategy, "dynamic": False} | weights,
        "input_activations": activations,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": _PATTERNS,
    }


def _quark(scheme: str) -> dict[str, Any]:
    weight = {"dtype": "fp8_e4m3", "qscheme": scheme, "is_dynamic": False, "ch_axis": 0, "symmetric": True}
    return {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": weight,
            "input_tensors": weight | {"is_dynamic": True, "ch_axis": 1},
            "output_tensors": None,
            "bias": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "exclude": ["lm_head", *_KEPT],
        "export": {"kv_cache_group": [], "pack_method": "order", "weight_format": "real_quantized"},
    }


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head", *_KEPT]}
FORMS: Mapping[str, Form] = {
    "fp8 block": Form("block", _FP8 | {"weight_block_size": [_BLOCK, _BLOCK]}, scale_name="weight_scale_inv"),
    "fp8 tensor": Form("tensor", _FP8),
    "compressed-tensors block": Form("block", _compressed_tensors("block", "group", block_structure=[_BLOCK, _BLOCK])),
    "compressed-tensors channel": Form("channel", _compressed_tensors("channel", "token")),
    "compressed-tensors tensor": Form(
        # vLLM takes scales of activations that are found per tensor for scales per block, and then has no kernel.
        "tensor",
        _compressed_tensors("tensor", "tensor", dynamic=False),
        static=True,
    ),
    "modelopt tensor": Form(
        "tensor", {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", *_KEPT]}, static=True
    ),
    "quark channel": Form("channel", _quark("per_channel"), flat=True),
    "quark tensor": Form("tensor", _quark("per_tensor")),
}


def write_fp8_checkpoint(form: Form, folder: Path, *, source: Path = TINY_MOE) -> Path:
    """Write the bundled model, or one of the same sizes, in a form, and return its folder."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "*.md"))
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = dict(form.config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        stem = name.removesuffix("weight")
        tensors[name], scale = _QUANTIZE[form.scales](tensor.float())
        tensors[stem + form.scale_name] = scale.flatten() if form.flat else scale
        if form.static:
            tensors[f"{stem}input_scale"] = torch.tensor(_INPUT_SCALE)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _per_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / _LARGEST
    return (weight / scale).to(torch.float8_e4m3fn), scale


def _per_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / _LARGEST
    return (weight / scale).to(torch.float8_e4m3fn), scale


def _per_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (size // _BLOCK for size in weight.shape)
    blocks = weight.view(rows, _BLOCK, columns, _BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / _LARGEST
    return (blocks / scale[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn), scale


_QUANTIZE: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "block": _per_block,
    "channel": _per_channel,
    "tensor": _per_tensor,
}
