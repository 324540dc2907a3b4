"""`bench --engine embedded --ablate`: what it prints, and which options are not for it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from moe_optimizer.cli.main import main
from moe_optimizer.errors import ExitCode
from moe_optimizer.measure.ablation import run
from moe_optimizer.measure.ablation.climb import ClimbRequest, climb
from moe_optimizer.measure.ablation.rungs import OPTIMIZATIONS
from moe_optimizer.measure.process import run_measurement
from moe_optimizer.plan.json_codec import decode, encode

ROOT = Path(__file__).resolve().parents[3]
TINY_MOE = str(ROOT / "examples" / "tiny-moe")
ABLATE = ["bench", TINY_MOE, "--engine", "embedded", "--ablate"]


def of_few_requests(module: str, request: dict[str, Any], **named: Any) -> Any:
    """The first rung in a process as the command starts it, the others in this one, which imports the engine once."""
    small = dataclasses.replace(request["settings"], num_requests=2, naive_requests=1, output_len=(2, 3))
    asked = {**request, "settings": small}
    if request["rung"] == 0:
        return run_measurement(module, asked, **named)
    return encode(climb(decode(ClimbRequest, encode(asked), origin="request"), named["on_step"]))


@pytest.mark.thorough
def test_the_rungs_are_printed_as_published(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    # Two rungs say what all say, and a few requests what many say.
    monkeypatch.setattr(run, "OPTIMIZATIONS", OPTIMIZATIONS[:2])
    monkeypatch.setattr(run, "run_measurement", of_few_requests)
    assert main([*ABLATE, "--dtype", "float32", "--repetitions", "2", "--json"]) == ExitCode.OK
    printed = json.loads(capsys.readouterr().out)
    schema = json.loads((ROOT / "docs" / "schemas" / "ablation.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(printed)
    assert [(rung["name"], len(rung["seconds"]), rung["equal"]) for rung in printed["rungs"]] == [
        ("naive loop", 2, 1.0), ("kv_cache", 2, 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bench", TINY_MOE, "--ablate"], "--engine vllm --ablate"),
        (["bench", TINY_MOE, "--engine", "embedded"], "--ablate together"),
        ([*ABLATE, "--clients", "4"], "--clients"),
        ([*ABLATE, "--against", "stock"], "--against"),
        ([*ABLATE, "--enable-fp8"], "--enable-fp8: --ablate"),
        ([*ABLATE, "--", "--block-size", "16"], "arguments after --: --ablate"),
    ],
    ids=str,
)
def test_what_is_not_for_it_is_refused(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == ExitCode.BAD_INPUT
    assert named in capsys.readouterr().err
