"""What FP8 and pruned experts save, measured from outside the code that saves it: the memory of a loading process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.passes.registry import resolve_wishes
from tests.vllm.conftest import ROOT, TINY_MOE, plan_here

LAYERS, EXPERTS, WIDTH = 8, 32, 512
BF16_BYTES = LAYERS * EXPERTS * 3 * WIDTH * WIDTH * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose experts (403 MB in BF16) stand out from everything else in a process."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("model")
    config = json.loads((TINY_MOE / "config.json").read_text())
    config |= {"hidden_size": WIDTH, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS}
    config |= {"num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Any:
        return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()

    tensors = {"model.embed_tokens.weight": randn(config["vocab_size"], WIDTH), "model.norm.weight": randn(WIDTH)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = randn(WIDTH)
        for norm in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{norm}.weight"] = randn(head_dim)
        for part, rows in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            tensors[f"{prefix}.self_attn.{part}.weight"] = randn(rows * head_dim, WIDTH)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = randn(WIDTH, heads * head_dim)
        tensors[f"{prefix}.mlp.gate.weight"] = randn(EXPERTS, WIDTH)
        for expert in range(EXPERTS):
            for part in ("gate_proj", "up_proj", "down_proj"):
                tensors[f"{prefix}.mlp.experts.{expert}.{part}.weight"] = randn(WIDTH, WIDTH)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


LOADS = {
    "bf16": ((), "auto"),
    "fp8": (("fp8",), "auto"),
    "made up": (("fp8",), "dummy"),
    "sparse": (("sparsity",), "auto"),
}
"""The passes that are switched on, and vLLM's load format."""


@pytest.fixture(scope="module")
def memory(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each load of the model cost, and the type of each part's weights."""
    folders = {name: tmp_path_factory.mktemp("run") for name in LOADS}
    one_layer = tmp_path_factory.mktemp("one_layer")
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 1}
    (one_layer / "config.json").write_text(json.dumps(config))
    loads = []
    for name, (enabled, load_format) in LOADS.items():
        plan = plan_here(model=model, batch_size=1, max_model_len=128, wishes=resolve_wishes(enabled, ()))
        (folders[name] / "plan.json").write_text(plan.to_json())
        loads.append(f"{folders[name] / 'plan.json'}={load_format}")
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.loading_memory", str(model), str(one_layer), *loads],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: json.loads((folder / "loading_memory.json").read_text()) for name, folder in folders.items()}


def test_the_expert_weights_halve(memory: dict[str, dict[str, Any]]) -> None:
    assert memory["bf16"]["expert_bytes"] == BF16_BYTES
    # And a scale in FP32 for each block of 128 x 128.
    assert memory["fp8"]["expert_bytes"] == BF16_BYTES // 2 + LAYERS * EXPERTS * 3 * (WIDTH // 128) ** 2 * 4


def test_the_process_is_smaller_by_half_of_the_experts(memory: dict[str, dict[str, Any]]) -> None:
    saved = memory["bf16"]["end_bytes"] - memory["fp8"]["end_bytes"]
    assert saved > 0.5 * BF16_BYTES - 25e6, memory


def test_pruned_the_process_is_smaller_by_seven_sixteenths_of_the_experts(memory: dict[str, dict[str, Any]]) -> None:
    saved = memory["bf16"]["end_bytes"] - memory["sparse"]["end_bytes"]
    assert saved > 7 / 16 * BF16_BYTES - 25e6, memory


def test_the_experts_are_never_all_there_in_bf16(memory: dict[str, dict[str, Any]]) -> None:
    # With the conversion after the last layer is loaded, the peak is all of BF16 and a layer more.
    assert memory["bf16"]["peak_bytes"] > BF16_BYTES, memory
    assert memory["fp8"]["peak_bytes"] < 0.9 * BF16_BYTES, memory
    assert memory["made up"]["peak_bytes"] < 0.9 * BF16_BYTES, memory
    assert memory["sparse"]["peak_bytes"] < 0.95 * BF16_BYTES, memory


def test_only_the_experts_are_in_fp8(memory: dict[str, dict[str, Any]]) -> None:
    types = memory["fp8"]["types"]
    in_fp8 = {part for part, dtype in types.items() if dtype == "float8_e4m3fn"}
    assert in_fp8 == {part for part in types if part.endswith(("w13_weight", "w2_weight"))} != set()
    # Router, embedding (here also the head), attention and norms.
    assert types["mlp.gate.weight"] == types["model.embed_tokens.weight"] == "bfloat16"
    scales = {f"{part}_scale" for part in in_fp8}
    assert {types[part] for part in scales} == {"float32"}
    assert {types[part] for part in types.keys() - in_fp8 - scales} == {"bfloat16"}
    assert set(memory["bf16"]["types"].values()) == {"bfloat16"}
