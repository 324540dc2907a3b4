"""Writes LoRA adapters of the bundled model as PEFT stores them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TINY_MOE = Path(__file__).resolve().parents[1] / "examples" / "tiny-moe"
ADAPTER = "attention"
"""What a server calls it."""
RANK = 8
ATTENTION = ("q_proj", "v_proj")
"""What the adapter changes, as the checkpoint names it."""


def write_attention_adapter(folder: Path) -> Path:
    """Write an adapter of random values on the attention of each layer to `folder`, which is made, and return it.

    Its values have a standard deviation of 0.2: large enough that answers change.
    """
    folder.mkdir()
    config = json.loads((TINY_MOE / "config.json").read_text(encoding="utf-8"))
    heads = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    generator, tensors = torch.Generator().manual_seed(5), {}
    for layer in range(config["num_hidden_layers"]):
        for name in ATTENTION:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for side, rows, columns in (
                ("lora_A", RANK, config["hidden_size"]), ("lora_B", heads[name] * config["head_dim"], RANK)
            ):  # fmt: skip
                tensors[f"{prefix}.{side}.weight"] = 0.2 * torch.randn(rows, columns, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny-moe", "bias": "none",
        "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(ATTENTION),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
    return folder


def write_summed(folder: Path, adapter: Path) -> Path:
    """Write the bundled model with the adapter's products added to its weights, in FP32, to `folder`, which is made."""
    folder.mkdir()
    for path in TINY_MOE.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, folder)
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    weights = {name: value.float() for name, value in load_file(TINY_MOE / "model.safetensors").items()}
    changes = load_file(adapter / "adapter_model.safetensors")
    for name, first in changes.items():
        if ".lora_A." in name:
            product = changes[name.replace(".lora_A.", ".lora_B.")] @ first
            target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            weights[target] += config["lora_alpha"] / config["r"] * product
    save_file(weights, folder / "model.safetensors")
    return folder


def lora_arguments(folder: Path) -> tuple[str, ...]:
    """Return the arguments of a server that has the adapter under the name ADAPTER, and lets none change experts."""
    return (
        "--enable-lora", "--max-lora-rank", str(RANK), "--lora-target-modules", *ATTENTION,
        "--lora-modules", f"{ADAPTER}={folder}",
    )  # fmt: skip
