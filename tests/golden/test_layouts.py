"""The layout that the search takes, over the grid of models, GPUs and clients that layouts are judged on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.layouts.search import Goal, Limits, rank
from moe_optimizer.specs.model import ModelSpec
from tests.unit.layouts.questions import by_itself, question

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "model_configs"
MODELS = {
    "Qwen3-30B-A3B": "qwen3_moe",
    "Qwen3-235B-A22B": "qwen3_moe_large",
    "Mixtral-8x7B": "mixtral",
    "GLM-4.5-Air": "glm4_moe",
    "gpt-oss-120b": "gpt_oss",
    "DeepSeek-V3": "deepseek_v3",
}
GPUS = {"H100": "h100_sxm", "H200": "h200"}
MACHINES = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2))
"""GPUs of a machine, machines."""
CLIENTS = (1, 32, 256, 1024)
WEIGHTS = {"dtype": "bf16", "fp8": "fp8_block"}


@pytest.mark.parametrize("goal", ["throughput", "latency"])
def test_the_chosen_layouts_are_the_golden_ones(golden, tmp_path, goal):
    lines = [
        f"| {goal}, 1,024 in, 512 out | GPUs | {' | '.join(f'{clients:,} clients' for clients in CLIENTS)} |",
        f"|---|--:|{'---|' * len(CLIENTS)}",
    ]
    for name, config in MODELS.items():
        model = _inspected(config, tmp_path / name)
        for gpu, hardware in GPUS.items():
            for gpus, machines in MACHINES:
                cells = [_chosen(model, goal, hardware, gpus, machines, clients) for clients in CLIENTS]
                lines.append(f"| {name}, {gpu} | {gpus * machines} | {' | '.join(cells)} |")
    golden("\n".join(lines) + "\n", Path(__file__).parent / "layouts" / f"{goal}.md")


def _inspected(config: str, folder: Path) -> ModelSpec:
    folder.mkdir()
    shutil.copy(CONFIGS / f"{config}.json", folder / "config.json")
    return ModelInspector().inspect(folder)


def _chosen(model: ModelSpec, goal: Goal, hardware: str, gpus: int, machines: int, clients: int) -> str:
    asked = question(
        model, gpus=gpus, machines=machines, hardware=hardware, clients=clients, input_tokens=1024, output_tokens=512,
        expert_bits=model.weight_bits if model.quant_method else 16, linear_bits=8 if model.weights_are_fp8 else 16,
        weights=WEIGHTS.get(model.expert_format, ""),
    )  # fmt: skip
    # A plan keeps the copies of a server on one machine.
    within = rank(asked, goal, Limits(), allowed=lambda each: by_itself(each) and each.devices_of_stage <= gpus).within
    return within[0].layout.name if within else "does not fit"
