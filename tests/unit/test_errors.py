"""Messages are safe to print, and every error has its published exit code."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer import errors


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain é 模型", "plain é 模型"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("bell\x07 c1\x9b31m", "bell\\x07 c1\\x9b31m"),
        ("rtl\u202egnp.exe", "rtl\\u202egnp.exe"),
        ("undecodable\udcff", "undecodable\\udcff"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
    ],
)
def test_printable_writes_out_what_a_terminal_would_obey(raw: str, shown: str) -> None:
    assert errors.printable(raw) == shown


@given(st.text(st.characters()))
def test_printable_leaves_no_control_or_format_character(text: str) -> None:
    left = {unicodedata.category(char) for char in errors.printable(text) if char not in "\n\t"}
    assert not left & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@given(st.text(st.characters()))
def test_printable_text_can_always_be_encoded(text: str) -> None:
    errors.printable(text).encode("utf-8")


def test_an_error_neutralises_its_message_and_hint() -> None:
    error = errors.InputError("bad \x1b]0;title\x07", hint="try \x1b[2J")
    assert str(error) == "bad \\x1b]0;title\\x07"
    assert error.hint == "try \\x1b[2J"


def test_bad_input_is_also_a_value_error() -> None:
    assert isinstance(errors.InputError("x"), ValueError)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InputError, 2),
        (errors.TensorContractError, 2),
        (errors.UnsupportedError, 3),
        (errors.DoesNotFitError, 3),
        (errors.KernelUnavailableError, 3),
        (errors.RequiredNotAppliedError, 6),
        (errors.ServerFailedError, 7),
    ],
)
def test_exit_codes_are_the_published_ones(kind: type[errors.MoeOptimizerError], code: int) -> None:
    assert kind("x").exit_code == code
