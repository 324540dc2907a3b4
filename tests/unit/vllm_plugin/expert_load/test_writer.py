"""Counts in files of the run folder."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optimizer.inspection.expert_load import read_run_load
from moe_optimizer.launcher.run_folder import RunFolder
from moe_optimizer.specs.expert_load import LOAD_FILE
from moe_optimizer.vllm_plugin.expert_load import writer as expert_load_writer
from moe_optimizer.vllm_plugin.expert_load.counter import LayerwiseCounter
from moe_optimizer.vllm_plugin.expert_load.writer import ExpertLoadWriter, part_path
from tests.builders import cpu_machine, made_plan, tiny_moe
from tests.eventually import eventually

EXPERTS = 4
IDS = torch.tensor([[0, 1], [1, 3], [2, 2]])


@pytest.fixture(autouse=True)
def _own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes soon, and waits for one as long as a busy disk takes."""
    monkeypatch.setattr(expert_load_writer, "INTERVAL_S", 0.01)
    monkeypatch.setattr(expert_load_writer, "UNSEEN_INTERVAL_S", 0.01)
    monkeypatch.setattr(expert_load_writer, "STOP_WAIT_S", 300.0)


def test_a_step_that_ends_while_the_table_is_read_is_written_later(tmp_path: Path) -> None:
    counter = LayerwiseCounter((0,), EXPERTS, top_k=2, max_rows=4)
    writer = ExpertLoadWriter(
        counter, model="m", layers=((0, "a"),), since="2026-11-20T10:00:00+00:00",
        path=part_path(tmp_path, 0), on_seen=lambda: None,
    )  # fmt: skip
    read = counter.table

    def table_then_step() -> Any:
        table = read()
        counter.count_rows(3)
        counter.capture(0, IDS)
        counter.step_ended()
        writer._steps += 1  # `stepped` would start the thread
        return table

    writer._steps = 1
    counter.table = table_then_step
    writer.write()
    counter.table = read
    writer.write()
    assert read_run_load(tmp_path).layers[0].total == IDS.numel()


def test_a_run_folder_that_takes_no_files_is_said_once_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    counter = LayerwiseCounter((0,), EXPERTS, top_k=2, max_rows=4)
    writer = ExpertLoadWriter(
        counter, model="m", layers=((0, "a"),), since="2026-11-20T10:00:00+00:00",
        path=tmp_path / "file" / "expert_load" / "0.json", on_seen=lambda: None,
    )  # fmt: skip
    counter.count_rows(3)
    counter.capture(0, IDS)
    counter.step_ended()
    for _ in range(3):
        writer.stepped()
        time.sleep(0.05)
    eventually(lambda: [record for record in caplog.records if "cannot be written" in record.getMessage()])
    assert len([record for record in caplog.records if "cannot be written" in record.getMessage()]) == 1


ENDS_IN_THE_MIDDLE = """
import atexit, sys, threading, time
from pathlib import Path
import torch
from moe_optimizer.vllm_plugin.expert_load import writer as expert_load_writer
from moe_optimizer.vllm_plugin.expert_load.writer import ExpertLoadWriter

expert_load_writer.STOP_WAIT_S = 300.0

class Counter:
    reading = threading.Event()
    def table(self):
        self.reading.set()
        time.sleep(0.2)
        return torch.ones(1, 6, dtype=torch.int64)

atexit.register(lambda: print("alive:", [t.name for t in threading.enumerate() if t.daemon]))
writer = ExpertLoadWriter(Counter(), model="m", layers=((0, "a"),), since="2026-11-20T10:00:00+00:00",
                          path=Path(sys.argv[1]) / "expert_load" / "0.json", on_seen=lambda: None)
writer.stepped()
Counter.reading.wait()
"""


@pytest.mark.thorough
def test_a_process_that_ends_lets_its_write_end_first(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_IN_THE_MIDDLE, str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "alive: []\n"), done.stderr
    assert read_run_load(tmp_path).layers[0].tokens == (1, 1, 1, 1)


@pytest.mark.parametrize("moment", ["before the first step", "after a step"])
def test_the_thread_ends_when_it_is_asked_to(moment: str, tmp_path: Path) -> None:
    writer = ExpertLoadWriter(
        LayerwiseCounter((0,), EXPERTS, top_k=2, max_rows=4), model="m", layers=((0, "a"),),
        since="2026-11-20T10:00:00+00:00", path=part_path(tmp_path, 0), on_seen=lambda: None,
    )  # fmt: skip
    before = set(threading.enumerate())
    writer.start()
    if moment == "after a step":
        writer.stepped()
    (thread,) = set(threading.enumerate()) - before
    writer.stop()
    assert not thread.is_alive()


def test_steps_since_the_last_write_are_written_when_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_load_writer, "INTERVAL_S", 600.0)
    counter = LayerwiseCounter((0,), EXPERTS, top_k=2, max_rows=4)
    writer = ExpertLoadWriter(
        counter, model="m", layers=((0, "a"),), since="2026-11-20T10:00:00+00:00",
        path=part_path(tmp_path, 0), on_seen=lambda: None,
    )  # fmt: skip
    counter.count_rows(3)
    for step in (1, 2):
        counter.capture(0, IDS)
        counter.step_ended()
        writer.stepped()
        if step == 1:
            eventually((tmp_path / LOAD_FILE).exists)
    writer.stop()
    load = read_run_load(tmp_path)
    assert (load.steps, load.layers[0].total) == (2, 2 * IDS.numel())


def test_counts_of_an_earlier_server_in_the_folder_are_removed(tmp_path: Path) -> None:
    for path in (part_path(tmp_path, 5), tmp_path / LOAD_FILE):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    RunFolder(tmp_path).prepare(made_plan(tiny_moe(), cpu_machine()))
    assert not part_path(tmp_path, 5).exists()
    assert not (tmp_path / LOAD_FILE).exists()
