"""What --json prints is what docs/schemas publishes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from moe_optimizer.plan.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "docs" / "schemas"
TINY_MOE = str(ROOT / "examples" / "tiny-moe")

OUTPUTS = {
    "inspect": (["inspect", TINY_MOE, "--json"], "inspect"),
    "plan": (["plan", TINY_MOE, "--json"], "plan"),
    "plan for a GPU": (["plan", TINY_MOE, "--hardware", "h100_sxm", "--gpus", "2", "--json"], "plan"),
    "dry run": (["serve", "--model", TINY_MOE, "--dry-run", "--json"], "plan"),
    "doctor": (["doctor", "--json"], "doctor"),
    "doctor of a model": (["doctor", "--model", TINY_MOE, "--json"], "doctor"),
    "doctor of vLLM": (["doctor", "--drift", "--json"], "doctor"),
    "experts": (["experts", str(ROOT / "tests" / "data" / "expert_load.json"), "--json"], "experts"),
    "build": (["build", "--check", "--json"], "build"),
    "configuration": (["plan", TINY_MOE, "--show-config", "--json"], "config"),
}


def published(name: str) -> Any:
    return json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))


def test_the_published_schemas_are_those_of_the_printed_types() -> None:
    spec = importlib.util.spec_from_file_location("write_schemas", ROOT / "scripts" / "write_schemas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = json.loads(json.dumps(module.schemas()))
    assert made == {path.name: json.loads(path.read_text(encoding="utf-8")) for path in SCHEMAS.glob("*.json")}


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_output_follows_its_schema(output: str, tmp_path: Path, run_command: Any) -> None:
    arguments, name = OUTPUTS[output]
    finished = run_command(arguments, program=("-m", "moe_optimizer"), cwd=tmp_path)
    assert finished.code in (0, 3), finished
    schema = published(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(json.loads(finished.stdout))


@pytest.mark.parametrize("change", [{"extra": 1}, {"num_experts": "16"}])
def test_the_schema_refuses_what_the_command_does_not_print(
    change: dict[str, Any], tmp_path: Path, run_command: Any
) -> None:
    finished = run_command(["inspect", TINY_MOE, "--json"], program=("-m", "moe_optimizer"), cwd=tmp_path)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(finished.stdout) | change, published("inspect"))


def test_a_file_of_counts_follows_its_schema() -> None:
    counts = json.loads((ROOT / "tests" / "data" / "expert_load.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(published("expert_load")).validate(counts)


def test_a_printed_plan_is_a_plan_file(tmp_path: Path, run_command: Any) -> None:
    finished = run_command(["plan", TINY_MOE, "--json"], program=("-m", "moe_optimizer"), cwd=tmp_path)
    plan = Plan.from_json(finished.stdout, origin="stdout")
    assert plan.to_json() + "\n" == finished.stdout


def test_equal_command_lines_print_equal_plans(tmp_path: Path, run_command: Any) -> None:
    arguments = ["plan", TINY_MOE, "--hardware", "h100_sxm", "--gpus", "1", "--json"]
    first, second = (run_command(arguments, program=("-m", "moe_optimizer"), cwd=tmp_path).stdout for _ in range(2))
    assert first == second != ""
