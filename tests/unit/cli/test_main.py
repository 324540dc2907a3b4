"""Failures become exit codes: interrupts, closed pipes, system errors and our own bugs."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from moe_optimizer.cli import INTERRUPTED, planning
from moe_optimizer.cli.main import main
from moe_optimizer.errors import DoesNotFitError, ExitCode, InputError, MoeOptimizerError, ServerFailedError


@pytest.fixture(autouse=True)
def _keep_signal_handler() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def failing_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(planning, "make", fail)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("bad"), ExitCode.BAD_INPUT),
        (DoesNotFitError("big"), ExitCode.UNSUPPORTED),
        (ServerFailedError("dead"), ExitCode.SERVER_FAILED),
    ],
)
def test_each_error_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: MoeOptimizerError, code: int
) -> None:
    failing_with(monkeypatch, error)
    assert main(["plan"]) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failing_with(monkeypatch, KeyboardInterrupt())
    assert main(["plan"]) == INTERRUPTED == 130
    assert capsys.readouterr() == ("", "")


def test_a_bug_is_one_line_and_a_hint_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_with(monkeypatch, KeyError("x"))
    assert main(["plan"]) == ExitCode.BUG
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("KeyError: 'x'")
    assert lines[2].startswith("hint: ")
    assert "--verbose" in lines[2]
    assert len(lines) == 3


def test_verbose_adds_the_traceback_of_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_with(monkeypatch, KeyError("x"))
    assert main(["plan", "--verbose"]) == ExitCode.BUG
    assert "Traceback" in capsys.readouterr().err


def test_verbose_among_vllms_arguments_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_with(monkeypatch, KeyError("x"))
    main(["serve", "--", "--verbose"])
    assert "Traceback" not in capsys.readouterr().err


def test_a_refused_system_call_is_not_called_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_with(monkeypatch, OSError(24, "Too many open files"))
    assert main(["plan"]) == ExitCode.BUG
    shown = capsys.readouterr().err
    assert "open files" in shown
    assert "bug" not in shown


def test_a_python_without_our_dependencies_is_told_how_to_set_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_with(monkeypatch, ModuleNotFoundError("No module named 'typer'", name="typer"))
    assert main(["plan"]) == ExitCode.UNSUPPORTED
    lines = capsys.readouterr().err.splitlines()
    assert "typer" in lines[0]
    assert "make setup" in lines[2]


def test_a_missing_module_of_our_own_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_with(monkeypatch, ModuleNotFoundError("No module named 'moe_optimizer.gone'", name="moe_optimizer.gone"))
    assert main(["plan"]) == ExitCode.BUG


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serve", "--nodes", "2"], "an option of moe-optimizer plan"),
        (["plan", "--html", "x"], "an option of moe-optimizer bench, report"),
        (["serve", "--profil", "x"], "did you mean --profile?"),
        (["serve", "--swap-space", "4"], "arguments of vllm serve go after --"),
        (["doctor", "--gpu", "1"], None),
    ],
)
def test_an_option_of_another_command_is_said_to_be_one(
    capsys: pytest.CaptureFixture[str], words: list[str], hint: str | None
) -> None:
    assert main(words) == ExitCode.BAD_INPUT
    assert (f"hint: {hint}\n" if hint else "") == capsys.readouterr().err.partition("\n\n")[2]
