"""Writes the JSON Schemas of the command line's --json outputs to docs/schemas.

The schemas are generated from the printed types. The committed files are the published contract, and a test compares
the two. Run it after a deliberate change:  python scripts/write_schemas.py
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from moe_optimizer.cli.check import Report
from moe_optimizer.cli.experts import ExpertsOutput
from moe_optimizer.cli.ready_server import ReadyServer
from moe_optimizer.measure.ablation.rungs import AblationResult
from moe_optimizer.measure.bench.result import BenchResult
from moe_optimizer.measure.live.activity import LiveActivity
from moe_optimizer.measure.quality.result import QualityResult
from moe_optimizer.measure.report.comparison import Comparison
from moe_optimizer.measure.tune.ledger import TuneResult
from moe_optimizer.plan.plan import Plan
from moe_optimizer.specs.expert_load import ExpertLoad
from moe_optimizer.specs.model import ModelSpec
from moe_optimizer.specs.software import KernelInventory

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> dict[str, dict[str, Any]]:
    """Return the schema of each command's --json output, by file name."""
    inspect = _schema(ModelSpec, "moe-optimizer inspect --json")
    inspect["properties"]["num_moe_layers"] = {"type": "integer", "description": "Layers with routed experts."}
    inspect["required"] = sorted(inspect["properties"])
    return {
        "inspect.schema.json": inspect,
        "plan.schema.json": _schema(Plan, "moe-optimizer plan --json and serve --dry-run --json"),
        "doctor.schema.json": _schema(Report, "moe-optimizer doctor --json"),
        "build.schema.json": _schema(KernelInventory, "moe-optimizer build --json"),
        "serve.schema.json": _schema(ReadyServer, "moe-optimizer serve --json, once the server is ready"),
        "bench.schema.json": _schema(BenchResult, "moe-optimizer bench --json"),
        "ablation.schema.json": _schema(AblationResult, "moe-optimizer bench --engine embedded --ablate --json"),
        "compare.schema.json": _schema(Comparison, "moe-optimizer compare --json"),
        "quality.schema.json": _schema(QualityResult, "moe-optimizer quality --json"),
        "tune.schema.json": _schema(TuneResult, "moe-optimizer tune --json"),
        "experts.schema.json": _schema(ExpertsOutput, "moe-optimizer experts --json"),
        "top.schema.json": _schema(LiveActivity, "moe-optimizer top --json"),
        "expert_load.schema.json": _schema(ExpertLoad, "expert_load.json of a run folder"),
        "config.schema.json": _config_schema(),
    }


def _schema(kind: type, title: str) -> dict[str, Any]:
    schema = _strict(TypeAdapter(kind).json_schema(mode="serialization"))
    return {"$schema": DIALECT, **schema, "title": title}


def _strict(node: Any) -> Any:
    """Require every field and allow no other: every field of a dataclass is always printed."""
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    strict = {key: _strict(value) for key, value in node.items() if key not in ("title", "default")}
    if "properties" in strict:
        # `properties` maps names to schemas, so a field called "title" must survive the line above.
        strict["properties"] = {name: _strict(value) for name, value in node["properties"].items()}
        strict |= {"required": sorted(strict["properties"]), "additionalProperties": False}
    return strict


def _config_schema() -> dict[str, Any]:
    setting = {
        "type": "object",
        "properties": {
            "value": {"type": ["string", "integer", "number", "boolean", "array", "null"]},
            "origin": {"type": "string", "description": "flag ..., environment ..., profile ... or default"},
        },
        "required": ["origin", "value"],
        "additionalProperties": False,
    }
    return {
        "$schema": DIALECT,
        "type": "object",
        "additionalProperties": setting,
        "title": "--show-config --json: every setting with its value and origin",
    }


def main() -> int:
    """Write all schemas."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas().items():
        (FOLDER / name).write_text(json.dumps(schema, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
