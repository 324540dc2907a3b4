"""Random weights of gpt-oss's shape, as the benchmarks write them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.serving.random_gpt_oss import write_random_gpt_oss

SMALL = {
    "num_hidden_layers": 2, "num_local_experts": 16, "hidden_size": 256, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip


def test_it_has_the_tensors_of_the_model_and_uses_all_experts(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = write_random_gpt_oss(tmp_path / "gpt-oss", **SMALL)
    written = {name for path in folder.glob("*.safetensors") for name in load_file(path)}
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        names = {name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()}
    experts = {name for name in names if name.endswith(("gate_up_proj", "down_proj"))}
    assert written == (names - experts) | {f"{name}_{part}" for name in experts for part in ("blocks", "scales")}

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    taken: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.router.register_forward_hook(lambda _module, _inputs, out: taken.append(out[-1]))
    with torch.no_grad():
        logits = model(torch.arange(256).unsqueeze(0)).logits
    assert logits.isfinite().all()
    for each in taken:
        share = torch.bincount(each.flatten(), minlength=16) / each.numel()
        assert share.min() > 1 / 160
        assert share.max() < 0.25
