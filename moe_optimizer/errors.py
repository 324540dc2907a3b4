"""Every error a user can cause, and the exit code it ends the command with.

An error message says what was wrong, what was got and what was expected; the optional hint says what
to do next. The command line prints the two without a traceback. Anything that is not a
`MoeOptimizerError` is our bug and ends with exit code 1.
"""

from __future__ import annotations

import unicodedata
from enum import IntEnum


class ExitCode(IntEnum):
    """The published exit codes of every command."""

    OK = 0
    BUG = 1
    BAD_INPUT = 2
    UNSUPPORTED = 3
    GOAL_MISSED = 4
    QUALITY_FAILED = 5
    NOT_APPLIED = 6
    SERVER_FAILED = 7


class MoeOptimizerError(Exception):
    """Base of all expected errors.

    Args:
        message: what, got, expected; one line, without a trailing full stop needed.
        hint: what the user can do about it; None when there is nothing useful to say.
    """

    exit_code = ExitCode.BUG

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(printable(message))
        self.hint = None if hint is None else printable(hint)


class InputError(MoeOptimizerError, ValueError):
    """The user's file, flag or environment variable is wrong."""

    exit_code = ExitCode.BAD_INPUT

    def named_by(self, origin: str) -> InputError:
        """Return the same error with the flag, variable or key that named what is wrong before it."""
        return InputError(f"{origin}: {self}", hint=self.hint)


class UnsupportedError(MoeOptimizerError):
    """The request is well formed, but this machine, model or version cannot do it."""

    exit_code = ExitCode.UNSUPPORTED


class DoesNotFitError(UnsupportedError):
    """The model needs more memory than the hardware has; the message carries the nearest miss."""


class GoalMissedError(MoeOptimizerError):
    """Nothing that is possible keeps the user's limits; the message carries the nearest miss."""

    exit_code = ExitCode.GOAL_MISSED


class RequiredNotAppliedError(MoeOptimizerError):
    """An optimization that was required did not run in every worker."""

    exit_code = ExitCode.NOT_APPLIED


class ServerFailedError(MoeOptimizerError):
    """The server died, never became ready, or failed requests."""

    exit_code = ExitCode.SERVER_FAILED


class KernelUnavailableError(UnsupportedError):
    """A compiled kernel was asked for that is not built for this machine; the message says what is."""


class TensorContractError(InputError):
    """A tensor's shape, dtype, device or stride differs from the op's contract."""


def printable(text: str) -> str:
    r"""Return `text` with control and format characters written out as \xNN or \uNNNN.

    File and model names reach the terminal through error messages; an escape sequence in one could
    otherwise recolour, overwrite or retitle it. Newlines and tabs are kept.
    """
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in _ESCAPED_CATEGORIES else _escaped(char)
        for char in text
    )


def described(error: BaseException) -> str:
    """Return an exception as one printable line for a `why_not`."""
    return printable(f"{type(error).__name__}: {error}").replace("\n", " ")[:300]


# Cc: control, Cf: format (bidirectional overrides), Cs: lone surrogates (undecodable file names),
# Zl and Zp: line and paragraph separators, which some terminals break lines at.
_ESCAPED_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def _escaped(char: str) -> str:
    code = ord(char)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
