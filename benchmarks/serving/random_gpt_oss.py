"""Writes gpt-oss's published shape with random weights whose sizes are those of a trained model's.

    python benchmarks/serving/random_gpt_oss.py FOLDER [--layers 24] [--experts 32]

vLLM's own random weights (--load-format dummy) are within 0.001 of zero, norms too. Then the router's bias decides, and
every token takes the same four experts. Here norms are one and the router has no bias, so routing is nearly even.
gpt-oss-20b has 24 layers of 32 experts (14 GB on the disk), gpt-oss-120b 36 of 128.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import parser_of  # noqa: E402
from benchmarks.serving.dummy_model import write_published_shape  # noqa: E402
from moe_optimizer.specs.expert_formats import MXFP4_GROUP  # noqa: E402

_CODE_STD = 2.93
"""Of MXFP4's sixteen numbers, each as often."""


def main() -> int:
    """Write the folder."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=32)
    options = parser.parse_args()
    print(write_random_gpt_oss(options.folder, num_hidden_layers=options.layers, num_local_experts=options.experts))
    return 0


def write_random_gpt_oss(folder: Path, **changes: int) -> Path:
    """Write the checkpoint, with the fields `changes` in place of the configuration's own.

    The experts of all layers are the same: drawing them takes longer than writing them.

    Returns:
        `folder`, which is made.
    """
    write_published_shape(folder, "gpt_oss", **changes)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("layer_types", None)
    path.write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    experts = _experts(config, generator)
    files: dict[str, str] = {}
    size = 0

    def save(tensors: dict[str, Tensor], name: str) -> None:
        nonlocal size
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, name))
        size += sum(tensor.nbytes for tensor in tensors.values())

    save(_ends(config, generator), "model-ends.safetensors")
    for index in range(config["num_hidden_layers"]):
        layer = _layer(config, generator) | experts
        save({f"model.layers.{index}.{name}": each for name, each in layer.items()}, f"model-{index:03d}.safetensors")
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return folder


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw weights that keep the size of what they multiply."""
    return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()


def _ends(config: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
    hidden, words = config["hidden_size"], config["vocab_size"]
    return {
        "model.embed_tokens.weight": torch.randn(words, hidden, generator=generator).bfloat16(),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": _normal(generator, words, hidden),
    }


def _layer(config: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Draw what a layer has beside its experts."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    wide, narrow = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    tensors = {
        "self_attn.sinks": torch.zeros(heads, dtype=torch.bfloat16),
        "mlp.router.weight": _normal(generator, config["num_local_experts"], hidden),
        "mlp.router.bias": torch.zeros(config["num_local_experts"], dtype=torch.bfloat16),
    }
    for name, rows, columns in (
        ("q", wide, hidden), ("k", narrow, hidden), ("v", narrow, hidden), ("o", hidden, wide),
    ):  # fmt: skip
        tensors[f"self_attn.{name}_proj.weight"] = _normal(generator, rows, columns)
        tensors[f"self_attn.{name}_proj.bias"] = torch.zeros(rows, dtype=torch.bfloat16)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return tensors


def _experts(config: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a layer's experts: codes of four bits, one E8M0 scale for all, no biases."""
    count, hidden, width = config["num_local_experts"], config["hidden_size"], config["intermediate_size"]
    tensors: dict[str, Tensor] = {}
    for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        groups = (count, rows, columns // MXFP4_GROUP)
        exponent = 127 + round(torch.tensor(columns**-0.5 / _CODE_STD).log2().item())
        tensors |= {
            f"mlp.experts.{name}_blocks": torch.randint(
                256, (*groups, MXFP4_GROUP // 2), generator=generator, dtype=torch.uint8
            ),
            f"mlp.experts.{name}_scales": torch.full(groups, exponent, dtype=torch.uint8),
            f"mlp.experts.{name}_bias": torch.zeros(count, rows, dtype=torch.bfloat16),
        }
    return tensors


if __name__ == "__main__":
    sys.exit(main())
