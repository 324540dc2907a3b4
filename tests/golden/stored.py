"""Reads and writes golden plans: what is the same in many of them is stored once and named in each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_optimizer.plan.plan import Plan

FOLDER = Path(__file__).parent
PLANS = sorted((FOLDER / "plans").glob("*.json"))
INPUTS = ("model", "hardware", "profile")
LIMITS = FOLDER / "inputs" / "limits.json"


def stored_texts(text: str, case: str, names: Mapping[str, str]) -> dict[Path, str]:
    """Return the files of a plan in JSON: its own, those of its inputs by their names, and that of the passes' limits.

    In the plan's own file the empty fields of decisions are left out.
    """
    data = json.loads(text)
    files: dict[Path, Any] = {FOLDER / "inputs" / key / f"{names[key]}.json": data[key] for key in INPUTS}
    files[LIMITS] = {decision["pass_name"]: decision.pop("limits") for decision in data["decisions"]}
    decisions = [{key: value for key, value in each.items() if value} for each in data["decisions"]]
    files[FOLDER / "plans" / f"{case}.json"] = data | {key: names[key] for key in INPUTS} | {"decisions": decisions}
    return {path: json.dumps(content, indent=2, sort_keys=True) + "\n" for path, content in files.items()}


def read_plan(path: Path) -> Plan:
    """Return a golden plan with its inputs."""
    data, limits = _read(path), _read(LIMITS)
    for key in INPUTS:
        data[key] = _read(FOLDER / "inputs" / key / f"{data[key]}.json")
    data["decisions"] = [each | {"limits": limits[each["pass_name"]]} for each in data["decisions"]]
    return Plan.from_json(json.dumps(data), origin=path.name)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
