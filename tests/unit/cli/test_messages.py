"""Errors come first, warnings wait, and no text can break the terminal."""

from __future__ import annotations

import io
import sys

import pytest

from moe_optimizer.cli import messages
from moe_optimizer.errors import InputError, ServerFailedError
from moe_optimizer.log import get_logger

LOGGER = get_logger("moe_optimizer.somewhere")


def warn_and_fail(*, verbose: bool) -> None:
    with messages.held_messages(verbose=verbose):
        LOGGER.debug("looking")
        LOGGER.warning("slow disk")
        raise InputError("bad")


def test_warnings_are_written_after_the_block_succeeded(capsys: pytest.CaptureFixture[str]) -> None:
    with messages.held_messages(verbose=False):
        LOGGER.warning("slow disk")
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "warning: slow disk\n"


def test_warnings_of_a_failed_block_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError):
        warn_and_fail(verbose=False)
    assert capsys.readouterr().err == ""


def test_verbose_shows_everything_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError):
        warn_and_fail(verbose=True)
    assert "looking" in capsys.readouterr().err


def test_an_error_is_one_line_a_blank_one_and_the_hint(capsys: pytest.CaptureFixture[str]) -> None:
    messages.write_error(InputError("cut\noff", hint="again"))
    assert capsys.readouterr().err.split("\n") == ["error: cut off", "", "hint: again", ""]


def test_escape_sequences_in_a_name_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    messages.write_error(InputError("\x1b[31mfolder\x1b]0;title\x07\u202eevil"))
    messages.write_warnings(["\x1b[2J"])
    error, warning = capsys.readouterr().err.splitlines()
    assert error == "error: \\x1b[31mfolder\\x1b]0;title\\x07\\u202eevil"
    assert warning == "warning: \\x1b[2J"


def test_a_dead_servers_log_follows_its_first_line_unjoined(capsys: pytest.CaptureFixture[str]) -> None:
    messages.write_error(ServerFailedError("server died\n  last line", hint="its log"))
    assert capsys.readouterr().err.splitlines() == ["error: server died", "  last line", "", "hint: its log"]


def test_text_that_the_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    messages.make_streams_safe()
    messages.write_data("caf\u00e9 \udcff")
    sys.stdout.flush()
    assert raw.getvalue() == b"caf\\xe9 \\udcff\n"


@pytest.mark.parametrize(
    ("terminal", "variables", "want"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
)
def test_colours_need_a_terminal_and_nobody_against_them(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, variables: dict[str, str], want: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    assert messages.use_color(stream) is want


def test_warnings_noted_on_an_error_come_between_it_and_its_hint(capsys: pytest.CaptureFixture[str]) -> None:
    error = InputError("no room", hint="make some")
    error.add_note("key twice")
    messages.write_error(error)
    assert capsys.readouterr().err.splitlines() == ["error: no room", "warning: key twice", "", "hint: make some"]
