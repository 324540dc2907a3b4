"""Lines for a person who waits, and when they are held."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from moe_optimizer.cli.progress import ProgressLines, progress_bar
from tests.eventually import eventually


def test_lines_and_warnings_are_held_in_order_until_they_are_released(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressLines(verbose=False)
    progress.line("starting \x1b[31mred")
    progress.warn(["two\nlines"])
    assert capsys.readouterr().err == ""
    progress.release()
    progress.line("ready")
    assert capsys.readouterr().err.splitlines() == ["starting \\x1b[31mred", "warning: two lines", "ready"]


@pytest.mark.parametrize(("terminal", "verbose"), [(True, False), (False, True)])
def test_a_terminal_and_verbose_get_them_at_once(
    terminal: bool, verbose: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    ProgressLines(verbose=verbose).line("starting")
    assert capsys.readouterr().err == "starting\n"


def test_a_closed_terminal_takes_no_lines_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_text: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys.stderr, "write", closed)
    ProgressLines(verbose=True).line("stopping")


def test_a_terminal_that_closes_under_a_bar_ends_as_its_signal_does(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def closed(text: str) -> int:
        if shown[-1:] == ["closed"]:
            raise OSError(errno.EIO, "Input/output error")
        shown.append(text)
        return len(text)

    monkeypatch.setattr(sys.stderr, "write", closed)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def measured() -> None:
        with progress_bar("kernels") as step:
            step(0.5, "half")
            shown.append("closed")
            raise SystemExit(129)

    with pytest.raises(SystemExit) as end:
        measured()
    assert end.value.code == 129
    assert len(shown) > 1


def test_a_bar_by_time_moves_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(sys.stderr, "write", lambda text: shown.append(text) or len(text))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    over = [0.0]
    with progress_bar("tune", share=lambda: over[0]) as step:
        step(0.0, "starting")
        eventually(lambda: any("starting" in each for each in shown), "no bar")
        before = next(each for each in reversed(shown) if "starting" in each).count("━")
        over[0] = 0.5
        shown.clear()
        # A bar that has begun has a half block at its end.
        eventually(lambda: any("╸" in each or "╺" in each for each in shown), "it stands still")
    assert before > 0


def test_a_live_line_is_cut_at_the_terminals_edge_and_written_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    progress = ProgressLines(verbose=True)
    progress.live("x" * 30)
    progress.live("loading weights")
    progress.line("ready")
    progress.line("served")
    over = "\r\x1b[K"
    assert capsys.readouterr().err == f"{'x' * 19}{over}loading weights{over}ready\nserved\n"


def test_from_the_second_minute_on_the_time_left_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an earlier run had done, here a half, says nothing of the pace."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with progress_bar("bench", lines=ProgressLines(verbose=True)) as step:
        for now[0], share in ((100.0, 0.5), (130.0, 0.55), (200.0, 0.6), (500.0, 0.99), (510.0, 1.0)):
            step(share, "round")
    left = [line.partition("round")[2].removeprefix(", ") for line in capsys.readouterr().err.splitlines()]
    assert left == ["", "", "about 7 min left", "about 1 min left", ""]


def test_what_turns_out_to_be_left_makes_it_longer_and_no_share_goes_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with progress_bar("bench", lines=ProgressLines(verbose=True)) as step:
        for now[0], share in ((0.0, 0.0), (120.0, 0.5), (130.0, 0.2), (300.0, 0.6)):
            step(share, "round")
    shown = [line.partition("round") for line in capsys.readouterr().err.splitlines()]
    assert [each[0].strip() for each in shown] == ["0%", "50%", "50%", "60%"]
    assert [each[2].removeprefix(", ") for each in shown] == [
        "", "about 2 min left", "about 9 min left", "about 3 min left",
    ]  # fmt: skip


def test_an_interrupted_run_says_how_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/bench 1")
    with (
        pytest.raises(KeyboardInterrupt),
        progress_bar("bench", lines=ProgressLines(verbose=True), folder=folder),
    ):
        raise KeyboardInterrupt
    assert "--resume --run-dir 'runs/bench 1'" in capsys.readouterr().err
