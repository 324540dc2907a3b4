"""The measuring process as the launcher sees it: steps, tables, failure, time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds, read_tables
from moe_optimizer.measure.kernel_speeds import calibration
from moe_optimizer.measure.kernel_speeds.measurement import Request
from moe_optimizer.specs.kernel_speeds import LayerShape, SpeedQuestion
from tests.eventually import eventually, is_running

QUESTION = SpeedQuestion(
    device="Some CPU (avx2), 2 threads",
    weights="bf16",
    shape=LayerShape(hidden_size=64, intermediate_size=32, num_experts=8, num_global_experts=8, top_k=2),
    kernel_hash="abc",
    vllm="0.32.0",
)
REQUEST = Request(device="cpu", questions=(QUESTION,), seconds=5.0, threads=2, tables="")

MEASURES = """
import json, sys
from pathlib import Path
from moe_optimizer.inspection.kernel_speeds import write_tables
from moe_optimizer.plan.json_codec import decode
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, TokenSpeeds
from moe_optimizer.measure.kernel_speeds.measurement import Request
request = decode(Request, json.loads(Path(sys.argv[1]).read_text()), origin="test")
print("a library talks")
print(json.dumps({"done": 1, "of": 2, "text": "1 tokens"}), flush=True)
question = request.questions[0]
write_tables(Path(request.tables), (KernelSpeeds(
    device=question.device, weights=question.weights, shape=question.shape, kernel_hash=question.kernel_hash,
    vllm=question.vllm, driver="", rows=(TokenSpeeds(tokens=1, stock_us=2.0, ours_us={"k": 1.0}),),
    source="measured", measured_here=True),))
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a program in the place of the measuring module."""

    def put(program: str) -> None:
        script = tmp_path / "program.py"
        script.write_text(program)
        monkeypatch.setattr(calibration, "_program", lambda: [sys.executable, str(script)])

    return put


def run(cache: Path, steps: list[Any] | None = None) -> str:
    found = [] if steps is None else steps
    return calibration.calibrate(REQUEST, on_step=lambda *step: found.append(step), cache=cache)


def test_what_was_measured_answers_the_question_afterwards(tmp_path: Path, child: Any) -> None:
    child(MEASURES)
    steps: list[Any] = []
    assert run(tmp_path / "cache", steps) == ""
    assert steps == [(1, 2, "1 tokens")]
    table = read_kernel_speeds(tmp_path / "cache").find(QUESTION)
    assert table is not None
    assert table.measured_here


def test_a_second_measurement_replaces_the_first(tmp_path: Path, child: Any) -> None:
    child(MEASURES)
    run(tmp_path / "cache")
    child(MEASURES.replace("stock_us=2.0", "stock_us=3.0"))
    run(tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    assert read_tables(path)[0].rows[0].stock_us == 3.0
    assert path.name == f"{calibration.table_name(QUESTION)}.json"


def test_a_process_that_fails_says_why_and_leaves_no_table(tmp_path: Path, child: Any) -> None:
    child("raise SystemExit('no such device')")
    assert run(tmp_path / "cache") == "exit 1: no such device"
    assert not (tmp_path / "cache").exists()


def test_a_process_that_ends_without_tables_is_told(tmp_path: Path, child: Any) -> None:
    child("")
    assert "tables.json" in run(tmp_path / "cache")


def test_a_process_that_hangs_is_ended(tmp_path: Path, child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expire = calibration._Deadline._expire
    # Not before it has come to hanging, however long that takes.
    monkeypatch.setattr(calibration._Deadline, "_expire", lambda self: (eventually(lambda: steps), expire(self)))
    monkeypatch.setattr(calibration, "START_UP_S", -4.9)
    child("""
import json, os, time
print(json.dumps({"done": 0, "of": 1, "text": str(os.getpid())}), flush=True)
time.sleep(600)
""")
    steps: list[Any] = []
    assert run(tmp_path / "cache", steps) == "not done after 0 s"
    ((_, _, pid),) = steps
    assert not is_running(int(pid))


def test_the_measuring_process_gets_no_plan(tmp_path: Path, child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPTIMIZER_PROFILE", "balanced")
    child("import os, sys; sys.exit(str([name for name in os.environ if name.startswith('MOE_OPTIMIZER_')]))")
    assert run(tmp_path / "cache") == "exit 1: []"


def test_tables_of_different_questions_have_different_files() -> None:
    import dataclasses

    names = {calibration.table_name(QUESTION)}
    for change in ({"weights": "fp32"}, {"vllm": "0.33.0"}, {"kernel_hash": "def"}, {"device": "Other"}):
        names.add(calibration.table_name(dataclasses.replace(QUESTION, **change)))
    assert len(names) == 5
