"""Holds what the engine's benchmarks share: shapes of models, beside the requests of `bench --ablate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_optimizer.measure.ablation.workload import Request, peak_bytes, random_requests

__all__ = ["SHAPES", "Request", "model_folder", "peak_bytes", "random_requests"]

_QWEN3 = {
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "rope_theta": 1e6,
    "max_position_embeddings": 40960, "head_dim": 128, "torch_dtype": "bfloat16",
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_DENSE = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
_MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3, **_DENSE, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        **_QWEN3, **_MOE, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    # For CPUs: a vocabulary that does not hide the layers.
    "qwen3-moe-0.3b": {
        **_QWEN3, **_MOE, "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 10,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
    },
}  # fmt: skip
"""The published shapes of Qwen3-0.6B and Qwen3-30B-A3B, and a small one; their weights are drawn at random."""


def model_folder(name: str, folder: Path) -> tuple[str, str]:
    """Return folder and load format of a model: a shape of `SHAPES`, written to `folder`, or a folder as it is."""
    if name not in SHAPES:
        return name, "auto"
    (folder / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
    return str(folder), "dummy"
