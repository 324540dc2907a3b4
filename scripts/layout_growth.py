"""Prints the table of docs/layout_accuracy.md: predicted tokens/s from 1 to 512 GPUs, even and uneven routing.

python scripts/layout_growth.py
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_optimizer.layouts.search import Limits, rank  # noqa: E402
from moe_optimizer.specs.model import ModelSpec  # noqa: E402
from tests.builders import deepseek_v3, expert_load, qwen3_30b_a3b  # noqa: E402
from tests.unit.layouts.questions import by_itself, question  # noqa: E402

MODELS: dict[str, tuple[ModelSpec, dict[str, object]]] = {
    "Qwen3-30B-A3B": (qwen3_30b_a3b(), {}),
    "DeepSeek-V3": (deepseek_v3(), {"expert_bits": 8, "linear_bits": 8, "weights": "fp8_block"}),
}
CLIENTS_PER_GPU = 64


def main() -> int:
    """Print a row for each model and number of GPUs."""
    print("| model | H200 | clients | layout | TPOT ms | tokens/s | a GPU | with a skewed load |")
    print("|---|--:|--:|---|--:|--:|--:|--:|")
    for name, (model, fields) in MODELS.items():
        for gpus in (1, 2, 4, 8, 16, 64, 512):
            machines = max(1, gpus // 8)
            asked = question(
                model, gpus=min(gpus, 8), machines=machines, hardware="h200", clients=CLIENTS_PER_GPU * gpus,
                input_tokens=1024, output_tokens=512, prompt_graphs=True, more_api_servers=True, **fields,
            )  # fmt: skip
            even = dataclasses.replace(asked, even_routing=True)
            found = rank(even, "throughput", Limits(), allowed=by_itself).within
            if not found:
                print(f"| {name} | {gpus} | {asked.clients:,} | does not fit | | | | |")
                continue
            best = found[0]
            skewed = dataclasses.replace(asked, load=expert_load(model))
            again = rank(skewed, "throughput", Limits(), allowed=lambda layout: layout == best.layout).within[0]  # noqa: B023
            change = again.tokens_per_s / best.tokens_per_s - 1
            print(
                f"| {name} | {gpus} | {asked.clients:,} | `{best.layout.name}` | {best.tpot_ms:.1f} "
                f"| {best.tokens_per_s:,.0f} | {best.tokens_per_s / gpus:,.0f} | {100 * change:+.0f} percent |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
