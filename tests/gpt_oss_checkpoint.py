"""Writes small random checkpoints as gpt-oss's are published: experts in MXFP4, biases, attention sinks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_optimizer.ops.mxfp4 import dequantize_mxfp4, quantize_mxfp4

TINY_MOE = Path(__file__).resolve().parents[1] / "examples" / "tiny-moe"
LAYERS, EXPERTS, TOP_K = 2, 8, 4
HIDDEN, WIDTH = 480, 96
"""Multiples of 32, which share a scale, and of nothing wider; rows of H / 2 bytes are filled up on a GPU."""
HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 2, 64, 2048
_GROUP = 32
_QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
_CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "experts_per_token": TOP_K,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initial_context_length": 512,
    "initializer_range": 0.02,
    "intermediate_size": WIDTH,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "max_position_embeddings": 2048,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "num_local_experts": EXPERTS,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 512,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}  # fmt: skip


def write_gpt_oss(folder: Path, *, dequantized: bool = False) -> Path:
    """Write a checkpoint with random weights, and return its folder.

    Args:
        folder: is made.
        dequantized: with the same experts in BF16, which holds every MXFP4 weight exactly.
    """
    ignored = shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json", "*.md", "*.txt")
    shutil.copytree(TINY_MOE, folder, ignore=ignored)
    config = _CONFIG if dequantized else _CONFIG | {"quantization_config": _QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = _tensors(torch.Generator().manual_seed(0), dequantized=dequantized)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tensors(generator: torch.Generator, *, dequantized: bool) -> dict[str, Tensor]:
    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    tensors = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, scale=1.0),
        "model.norm.weight": 1 + normal(HIDDEN, scale=0.1),
        "lm_head.weight": normal(VOCABULARY, HIDDEN, scale=0.3),
    }
    for index in range(LAYERS):
        layer = f"model.layers.{index}."
        for name, rows, columns in (
            ("q", HEADS * HEAD_DIM, HIDDEN), ("k", KV_HEADS * HEAD_DIM, HIDDEN),
            ("v", KV_HEADS * HEAD_DIM, HIDDEN), ("o", HIDDEN, HEADS * HEAD_DIM),
        ):  # fmt: skip
            tensors[f"{layer}self_attn.{name}_proj.weight"] = normal(rows, columns, scale=columns**-0.5)
            tensors[f"{layer}self_attn.{name}_proj.bias"] = normal(rows, scale=0.1)
        tensors[f"{layer}self_attn.sinks"] = normal(HEADS, scale=1.0)
        tensors[f"{layer}mlp.router.weight"] = normal(EXPERTS, HIDDEN, scale=HIDDEN**-0.5)
        tensors[f"{layer}mlp.router.bias"] = normal(EXPERTS, scale=0.1)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{norm}.weight"] = 1 + normal(HIDDEN, scale=0.1)
        # Large enough that the activation clamps some of its inputs.
        gate_up = quantize_mxfp4(normal(EXPERTS, 2 * WIDTH, HIDDEN, scale=4 * HIDDEN**-0.5))
        down = quantize_mxfp4(normal(EXPERTS, HIDDEN, WIDTH, scale=WIDTH**-0.5))
        for name, (codes, scales) in (("gate_up_proj", gate_up), ("down_proj", down)):
            experts = f"{layer}mlp.experts.{name}"
            tensors[f"{experts}_bias"] = normal(*codes.shape[:2], scale=0.5)
            if dequantized:
                dense = dequantize_mxfp4(codes, scales, torch.bfloat16)
                tensors[experts] = dense.transpose(1, 2).contiguous()
            else:
                tensors[f"{experts}_blocks"] = codes.unflatten(-1, (-1, _GROUP // 2))
                tensors[f"{experts}_scales"] = scales
    return tensors
