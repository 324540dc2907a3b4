"""Writes a trained network as a Hugging Face Qwen3-MoE folder, one tensor per expert matrix, in BF16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tiny_moe.tokenizer import END_OF_TEXT, IM_END, SPECIAL_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

    from tiny_moe.network import Shape, TinyMoe

BALANCE_COEFFICIENT = 0.02
"""Weight of the load-balancing loss in training; also written to config.json for whoever trains further."""


def hub_config(shape: Shape) -> dict[str, Any]:
    """config.json of the network, with the field names of `Qwen3MoeForCausalLM`."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.expert_width * shape.experts_per_token,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": BALANCE_COEFFICIENT,
        "output_router_logits": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_position,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        "bos_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        "eos_token_id": SPECIAL_TOKENS.index(IM_END),
    }


def hub_tensors(network: TinyMoe) -> dict[str, Tensor]:
    """Weights under the names that Hugging Face checkpoints of this architecture use, BF16 on the CPU."""
    tensors: dict[str, Tensor] = {}
    width = network.shape.expert_width
    for name, weight in network.state_dict().items():
        if name == "embed_tokens":
            tensors["model.embed_tokens.weight"] = weight
        elif name.endswith("mlp.gate_up_proj"):
            prefix = "model." + name.removesuffix("gate_up_proj")
            for expert_id, gate_up in enumerate(weight):
                tensors[f"{prefix}experts.{expert_id}.gate_proj.weight"] = gate_up[:width]
                tensors[f"{prefix}experts.{expert_id}.up_proj.weight"] = gate_up[width:]
        elif name.endswith("mlp.down_proj"):
            prefix = "model." + name.removesuffix("down_proj")
            for expert_id, down in enumerate(weight):
                tensors[f"{prefix}experts.{expert_id}.down_proj.weight"] = down
        else:
            tensors["model." + name.removesuffix(".weight") + ".weight"] = weight
    return {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in sorted(tensors.items())}


def save_checkpoint(network: TinyMoe, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    from safetensors.torch import save_file

    config = hub_config(network.shape)
    _write_json(folder / "config.json", config)
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": [config["eos_token_id"], config["pad_token_id"]],
        "pad_token_id": config["pad_token_id"],
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
    }
    _write_json(folder / "generation_config.json", generation)
    save_file(hub_tensors(network), folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def difference_to_transformers(network: TinyMoe, folder: Path, token_ids_BL: Tensor) -> float:
    """Largest |logit difference| in FP32 between this network, its weights rounded to BF16, and the saved folder.

    Rounds `network` in place: afterwards it computes with exactly what the folder holds.
    """
    from transformers import Qwen3MoeForCausalLM

    saved = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    rounded = network.cpu().float()
    for parameter in rounded.parameters():
        parameter.copy_(parameter.bfloat16().float())
    ours, _ = rounded(token_ids_BL)
    return float((ours - saved(token_ids_BL).logits).abs().max())
