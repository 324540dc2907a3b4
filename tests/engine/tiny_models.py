"""Random-weight models of every family, small enough to build in a test, written as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TINY_MOE = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"

_BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
_QWEN3_MOE = {**_BASE, **_EXPERTS, "moe_intermediate_size": 32, "head_dim": 16}

# One model for each thing that a shape or a setting can change.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {**_BASE, "head_dim": 16}),
    "qwen3-tied": ("qwen3", {**_BASE, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {**_BASE, "head_dim": 16, "attention_bias": True}),
    "qwen3-head-dim-80": ("qwen3", {**_BASE, "head_dim": 80}),
    "qwen3-one-kv-head": ("qwen3", {**_BASE, "head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 1}),
    "qwen3-all-kv-heads": ("qwen3", {**_BASE, "head_dim": 32, "num_key_value_heads": 4}),
    # Its matrices are large enough for copies in oneDNN's order.
    "qwen3-wide": ("qwen3", {**_BASE, "head_dim": 64, "num_attention_heads": 8, "hidden_size": 512,
        "intermediate_size": 512, "initializer_range": 0.05}),
    "qwen3-linear-rope": ("qwen3", {**_BASE, "head_dim": 16, "rope_parameters": {
        "rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "qwen3-yarn": ("qwen3", {**_BASE, "head_dim": 16, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 64}}),
    "qwen3-llama3-rope": ("qwen3", {**_BASE, "head_dim": 16, "rope_parameters": {
        "rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    "qwen3_moe": ("qwen3_moe", _QWEN3_MOE),
    "qwen3_moe-dense-layers": ("qwen3_moe", {**_QWEN3_MOE, "num_hidden_layers": 4, "mlp_only_layers": [0],
        "decoder_sparse_step": 2, "norm_topk_prob": True}),
    "mixtral": ("mixtral", {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-odd-experts": ("mixtral", {**_BASE, "intermediate_size": 40, "num_local_experts": 3,
        "num_experts_per_tok": 3, "num_key_value_heads": 1}),
    "olmoe": ("olmoe", {**_BASE, **_EXPERTS}),
    "olmoe-clipped": ("olmoe", {**_BASE, **_EXPERTS, "clip_qkv": 0.5, "norm_topk_prob": True}),
    # An even vocabulary, for ranks that share it.
    "qwen3-even": ("qwen3", {**_BASE, "vocab_size": 98, "head_dim": 16, "attention_bias": True,
        "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mixtral-even": ("mixtral", {**_BASE, "vocab_size": 98, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe-even": ("qwen3_moe", {**_QWEN3_MOE, "vocab_size": 98}),
}  # fmt: skip


def write_model(folder: Path, name: str, *, dtype: torch.dtype = torch.float32, shard_size: str = "1GB") -> Path:
    """Write the model `name` of `SHAPES` with random weights; norms differ from 1 and biases from 0."""
    # Here, because every test worker imports this file.
    from transformers import AutoConfig, AutoModelForCausalLM

    family, settings = SHAPES[name]
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder
