"""Seconds of each phase of a start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_optimizer.launcher import start_up_ledger
from moe_optimizer.launcher.start_up_ledger import StartUpLedger, render_phases, vllm_phases

LOG = """\
(Worker pid=1) [gpu_model_runner.py:5150] Model loading took 28.46 GiB memory and 9.250000 seconds
(Worker pid=2) [gpu_model_runner.py:5150] Model loading took 28.46 GiB memory and 10.500000 seconds
(Worker pid=1) [monitor.py:20] torch.compile took 21.40 s in total
(Worker pid=1) [gpu_model_runner.py:6582] Graph capturing finished in 117 secs, took 4.10 GiB
moe-optimizer INFO: the canary of 48 layers took 2.31 s, before ready
moe-optimizer INFO: the canary of 48 layers took 9.00 s, after a reload
[core.py:403] init engine (profile, create kv cache, warmup model) took 150.20 s (compilation: 21.40 s)
"""


def test_vllms_own_phases_are_read_from_its_log_and_the_slowest_worker_counts(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(LOG)
    assert vllm_phases(tmp_path / "server.log") == {
        "vLLM: weights": 10.5, "vLLM: torch.compile": 21.4, "vLLM: graphs": 117.0, "vLLM: engine": 150.2,
        "vLLM: canary": 2.31,
    }  # fmt: skip


def test_a_log_that_is_not_there_tells_nothing(tmp_path: Path) -> None:
    assert vllm_phases(tmp_path / "server.log") == {}


def test_a_phase_is_as_long_as_since_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 148.0, 152.5])
    monkeypatch.setattr(start_up_ledger, "time", SimpleNamespace(monotonic=lambda: next(times)))
    ledger = StartUpLedger()
    ledger.ended("vLLM answers")
    ledger.ended("warm-up")
    assert ledger.phases(tmp_path / "none") == {"vLLM answers": 48.0, "warm-up": 4.5}


def test_phases_are_shown_a_line_each_and_what_vllm_alone_does_not_have_together() -> None:
    phases = {"vLLM answers": 48.0, "vLLM: canary": 1.0, "warm-up": 4.0, "warm-up: sampling": 3.0, "proofs": 0.25}
    assert render_phases(phases) == (
        "vLLM answers          48.0 s",
        "vLLM: canary           1.0 s",
        "warm-up                4.0 s",
        "warm-up: sampling      3.0 s",
        "proofs                 0.2 s",
        "ours of these          5.2 s",
    )
    assert render_phases({}) == ()


def test_phases_of_stock_vllm_stand_beside_ours_those_that_only_it_has_too() -> None:
    ours, stock = {"vLLM answers": 48.0, "warm-up": 4.0}, {"vLLM answers": 50.0, "vLLM: graphs": 9.0}
    assert render_phases(ours, stock) == (
        "vLLM answers      48.0 s     50.0 s",
        "warm-up            4.0 s",
        "ours of these      4.0 s",
        "vLLM: graphs                  9.0 s",
    )
    assert render_phases(ours, {}) == render_phases(ours)
