"""Draws the plots of README and docs from benchmark records, as SVG files that are light or dark as their reader is.

    python scripts/draw_figures.py

The drawing is that of `moe-optimizer report`. A test compares the files with what the records give.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_optimizer.inspection.hardware_catalog import load_catalog_entry  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import read_tables, shipped_dir  # noqa: E402
from moe_optimizer.measure.report.chart import Point, Series, chart  # noqa: E402
from moe_optimizer.measure.report.inputs import read_inputs  # noqa: E402
from moe_optimizer.measure.report.ledger_figure import ledger_figure  # noqa: E402
from moe_optimizer.measure.report.roofline_figure import roofline  # noqa: E402
from moe_optimizer.measure.report.scale import by_rank, fitting  # noqa: E402
from moe_optimizer.measure.report.svg import Picture  # noqa: E402

FOLDER = ROOT / "docs" / "images"
RECORDS = ROOT / "benchmarks" / "records"
SERVED = "2026-11-22_h100_served.json"
STEP = "2026-11-22_h100_decode_step.json"
_BATCH = 64
_WIDTH = 480.0


def figures() -> dict[str, Picture]:
    """Return each picture by the name of its file."""
    served = json.loads((RECORDS / SERVED).read_text(encoding="utf-8"))
    gpu = load_catalog_entry("h100_sxm").gpu
    tables = {
        table.weights: table
        for table in read_tables(shipped_dir() / "nvidia_h100_80gb_hbm3.json")
        if (table.shape.hidden_size, table.shape.intermediate_size, table.shape.num_experts) == (2048, 768, 128)
    }
    ledgers = read_inputs([RECORDS / STEP]).ledgers
    stock, ours = next(pair for pair in ledgers if pair[1].batch == _BATCH)
    return {
        "served_h100.svg": served_figure(served),
        "roofline_h100_bf16.svg": roofline(tables["bf16"], gpu),
        "roofline_h100_fp8.svg": roofline(tables["fp8_block"], gpu),
        "decode_step_h100.svg": ledger_figure(stock, ours),
    }


def served_figure(record: dict[str, Any]) -> Picture:
    """Return output tokens per second of both sides, by clients."""
    names = {"balanced": "balanced profile", "stock": "stock vLLM"}
    sides = {names[side["name"]]: side["loads"] for side in record["sides"]}
    rates = {name: [load["output_tokens_per_s"] for load in loads] for name, loads in sides.items()}
    clients = [str(load["clients"]) for load in next(iter(sides.values()))]
    return chart(
        "Output tokens per second, one H100",
        "Qwen3-30B-A3B in BF16, prompts of 512 and answers of 128 tokens. "
        + "; ".join(f"{name}: {', '.join(f'{rate:.0f}' for rate in found)}" for name, found in rates.items())
        + f" tokens/s at {', '.join(clients)} clients.",
        x=by_rank(clients),
        y=fitting([rate for found in rates.values() for rate in found]),
        x_label="clients at the same time",
        series=[
            Series(
                name=name,
                points=tuple(
                    Point(x=float(rank), y=rate, says=f"{name}, {clients[rank]} clients: {rate:.0f} tokens/s")
                    for rank, rate in enumerate(found)
                ),
            )
            for name, found in rates.items()
        ],
        ranks=True,
        width=_WIDTH,
        height=330.0,
    )


def main() -> int:
    """Write the files."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, picture in figures().items():
        (FOLDER / name).write_text(picture.markup(standalone=True), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
