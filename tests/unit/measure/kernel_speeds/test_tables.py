"""Measured speeds as tables in the user's folder; what a measuring process may do is tested in test_process.py."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import MoeOptimizerError
from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds, read_tables
from moe_optimizer.measure.kernel_speeds.measurement import SpeedRequest
from moe_optimizer.measure.kernel_speeds.tables import measure_speeds, table_name
from moe_optimizer.specs.kernel_speeds import LayerShape, SpeedQuestion

ROOT = Path(__file__).resolve().parents[4]
QUESTION = SpeedQuestion(
    device="Some CPU (avx2), 2 threads",
    weights="bf16",
    shape=LayerShape(hidden_size=64, intermediate_size=32, num_experts=8, num_global_experts=8, top_k=2),
    kernel_hash="abc",
    vllm="0.32.0",
)
REQUEST = SpeedRequest(device="cpu", questions=(QUESTION,), seconds=5.0, cores=(0, 1))

MEASURES = """
import sys
from pathlib import Path
from moe_optimizer.inspection.kernel_speeds import write_tables
from moe_optimizer.measure.kernel_speeds.measurement import SpeedRequest
from moe_optimizer.measure.process import answer_request
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, TokenSpeeds

def measure(request, on_step):
    on_step(0.5, "1 tokens")
    question = request.questions[0]
    write_tables(Path(request.tables), (KernelSpeeds(
        device=question.device, weights=question.weights, shape=question.shape, kernel_hash=question.kernel_hash,
        vllm=question.vllm, driver="", rows=(TokenSpeeds(tokens=1, stock_us=2.0, ours_us={"k": 1.0}),),
        source="measured", measured_here=True),))

sys.exit(answer_request(SpeedRequest, sys.argv[1:], measure))
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a program in the place of the measuring module."""
    # Two programs of the same size within one second would share the bytecode of the first.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def put(program: str) -> None:
        (tmp_path / "program.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")

    return put


DIES = MEASURES.replace("sys.argv[1:], measure", "sys.argv[1:], lambda *given: (measure(*given), os._exit(9))").replace(
    "import sys", "import os, sys"
)
UNFINISHED = MEASURES.replace("measured_here=True", "measured_here=True, unfinished=not request.started")


def run(cache: Path, steps: list[Any] | None = None, *, start_up_s: float = 60.0) -> None:
    found = [] if steps is None else steps
    measure_speeds(
        REQUEST, on_step=lambda *step: found.append(step), cache=cache, module="program", start_up_s=start_up_s
    )


def test_what_was_measured_answers_the_question_afterwards(tmp_path: Path, child: Any) -> None:
    child(MEASURES)
    steps: list[Any] = []
    run(tmp_path / "cache", steps)
    assert steps == [(0.5, "1 tokens")]
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
    assert path.name == f"{table_name(QUESTION)}.json"


@pytest.mark.parametrize(
    ("program", "said"), [("raise SystemExit('no such device')", "no such device"), ("", "exit 0")]
)
def test_a_process_that_ends_without_tables_leaves_none(tmp_path: Path, child: Any, program: str, said: str) -> None:
    child(program)
    with pytest.raises(MoeOptimizerError, match=said):
        run(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path, child: Any) -> None:
    child("import time; time.sleep(600)")
    with pytest.raises(MoeOptimizerError, match="after 1 s"):
        run(tmp_path / "cache", start_up_s=1.0 - REQUEST.seconds)


def test_a_second_measurement_goes_on_with_what_the_first_left_unfinished(tmp_path: Path, child: Any) -> None:
    child(UNFINISHED)
    run(tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    assert read_tables(path)[0].unfinished
    run(tmp_path / "cache")
    assert not read_tables(path)[0].unfinished


def test_a_broken_table_is_measured_from_the_start(tmp_path: Path, child: Any) -> None:
    (tmp_path / "cache").mkdir()
    path = tmp_path / "cache" / f"{table_name(QUESTION)}.json"
    path.write_text("{")
    child(UNFINISHED)
    run(tmp_path / "cache")
    assert read_tables(path)[0].unfinished


def test_what_a_process_measured_before_it_died_is_kept(
    tmp_path: Path, child: Any, caplog: pytest.LogCaptureFixture
) -> None:
    child(DIES)
    run(tmp_path / "cache")
    assert read_kernel_speeds(tmp_path / "cache").find(QUESTION) is not None
    assert "exit 9" in caplog.text


PEER = MEASURES.replace("import sys", "import os, sys").replace(
    "measured_here=True),))",
    """measured_here=True, unavailable={"cutlass": "it ended the measuring process at 8 tokens"}),))
    if not request.started:
        os._exit(9)""",
)


def test_a_backend_that_ends_the_process_is_left_out_and_the_measurement_goes_on(
    tmp_path: Path, child: Any, caplog: pytest.LogCaptureFixture
) -> None:
    child(PEER)
    steps: list[Any] = []
    run(tmp_path / "cache", steps)
    assert len(steps) == 2
    assert "cutlass ended the measurement" in caplog.text
    child(DIES)
    run(tmp_path / "again", steps)
    assert len(steps) == 3


def test_the_measuring_process_gets_no_plan(tmp_path: Path, child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPTIMIZER_PROFILE", "balanced")
    child("import os, sys; sys.exit(str([name for name in os.environ if name.startswith('MOE_OPTIMIZER_')]))")
    with pytest.raises(MoeOptimizerError, match=r"exit 1: \[\]"):
        run(tmp_path / "cache")


def test_tables_of_different_questions_have_different_files() -> None:
    names = {table_name(QUESTION)}
    change: dict[str, Any]
    for change in (
        {"weights": "fp32"}, {"vllm": "0.33.0"}, {"kernel_hash": "def"}, {"device": "Other"}, {"torch": "3"},
        {"triton": "4"}, {"driver": "600"}, {"environment": "tuned=abc"},
    ):  # fmt: skip
        names.add(table_name(dataclasses.replace(QUESTION, **change)))
    assert len(names) == 9
