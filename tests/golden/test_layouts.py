"""The layout that a plan takes, over the grid of models, GPUs and clients that layouts are judged on."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.layouts.search import Goal
from moe_optimizer.planner import make_plan
from moe_optimizer.specs.model import ModelSpec
from tests.builders import gpus, request, software
from tests.unit.layouts.questions import TABLES

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
SOFTWARE = dataclasses.replace(software("cuda"), kernel_speeds=TABLES)


@pytest.mark.parametrize("goal", ["throughput", "latency"])
def test_the_chosen_layouts_are_the_golden_ones(golden, tmp_path, goal):
    lines = [
        f"| {goal}, 1,024 in, 512 out | GPUs | {' | '.join(f'{clients:,} clients' for clients in CLIENTS)} |",
        f"|---|--:|{'---|' * len(CLIENTS)}",
    ]
    for name, config in MODELS.items():
        model = _inspected(config, tmp_path / name)
        for gpu, hardware in GPUS.items():
            for count, machines in MACHINES:
                cells = [_chosen(model, goal, hardware, count, machines, clients) for clients in CLIENTS]
                lines.append(f"| {name}, {gpu} | {count * machines} | {' | '.join(cells)} |")
    golden("\n".join(lines) + "\n", Path(__file__).parent / "layouts" / f"{goal}.md")


def _inspected(config: str, folder: Path) -> ModelSpec:
    folder.mkdir()
    shutil.copy(CONFIGS / f"{config}.json", folder / "config.json")
    return ModelInspector().inspect(folder)


def _chosen(model: ModelSpec, goal: Goal, hardware: str, gpus_of_machine: int, machines: int, clients: int) -> str:
    asked = request(
        model, gpus(hardware, gpus_of_machine), software=SOFTWARE, num_nodes=machines,
        num_gpus=gpus_of_machine * machines, clients=clients, goal=goal, batch_size=max(CLIENTS),
        input_tokens=1024, output_tokens=512,
    )  # fmt: skip
    try:
        choice = make_plan(asked).layouts
    except UnsupportedError:
        return "does not fit"
    assert choice is not None
    return choice.chosen
