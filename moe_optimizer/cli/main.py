"""Runs one command of `moe-optimizer` or `run_optimizer.py` and turns every failure into an exit code.

The module imports only what the interpreter has loaded already, so that an interrupt during any other import is caught
here. Python itself handles an interrupt before that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from moe_optimizer.cli import INTERRUPTED

PIPE_CLOSED = 128 + 13
"""Exit code when the reader of stdout or stderr went away (SIGPIPE), as shells report it."""
_ROOT = os.path.realpath(__file__).rpartition("/moe_optimizer/")[0]
"""The folder that holds this package: a checkout, or site-packages."""


def main(argv: Sequence[str] | None = None, *, program: str = "moe-optimizer", command: str | None = None) -> int:
    """Run one command line and return its exit code. Errors of the user or the system are not raised.

    Args:
        argv: the arguments after the program's name; default: this process's.
        program: the name that help and errors show.
        command: the command to run with all of `argv`; default: the first of `argv` names it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _leave_out_current_folder()
    try:
        from moe_optimizer.cli.app import run

        code = run(arguments, program=program, command=command)
        # Flush before the interpreter exits: a closed pipe or a full disk must still change the exit code.
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        import signal

        # A second Ctrl-C must not interrupt the interpreter's own clean-up with a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED
    except BrokenPipeError:
        _silence(sys.stdout)
        return PIPE_CLOSED
    except OSError as error:
        _silence(sys.stdout)
        return _system_failure(error)
    except ModuleNotFoundError as error:
        return _missing_package(error, arguments)
    except Exception as error:  # noqa: BLE001 - anything else is our bug
        return _our_bug(error, verbose=_asks_for_verbose(arguments))


def _leave_out_current_folder() -> None:
    """Import nothing that lies in the folder this was started in, unless that is where this package lies.

    `python -m` looks there first, and an empty entry of PYTHONPATH means it too.
    """
    try:
        here = os.getcwd()  # noqa: PTH109 - pathlib is not imported yet
    except OSError:
        return  # the folder is gone, and nothing can lie in it
    if here == _ROOT:
        return
    if sys.path[0] in ("", here):
        del sys.path[0]
    entries = os.environ.get("PYTHONPATH", "x").split(os.pathsep)
    if "" in entries and here in sys.path[: len(entries) + 1]:
        sys.path.remove(here)


def _missing_package(error: ModuleNotFoundError, arguments: Sequence[str]) -> int:
    """Report a Python without the packages: set-up has not run, or another environment is active."""
    from moe_optimizer.cli.messages import write_error_lines
    from moe_optimizer.errors import ExitCode

    if (error.name or "").startswith("moe_optimizer"):
        return _our_bug(error, verbose=_asks_for_verbose(arguments))
    write_error_lines(
        f"{sys.executable}: the package {error.name} is not installed for this Python",
        hint="run: make setup; then start with .venv/bin/python, or from an environment with this package installed",
    )
    return ExitCode.UNSUPPORTED


def _system_failure(error: OSError) -> int:
    import errno

    from moe_optimizer.cli.messages import write_error_lines
    from moe_optimizer.errors import ExitCode

    # An error without a file name concerns stdout or stderr.
    full = error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    try:
        if full:
            write_error_lines(
                f"the output cannot be written: {error.strerror}", hint="make room there, or send it somewhere else"
            )
        else:
            write_error_lines(f"the system refused an operation: {error}", hint=None)
    except OSError:
        # stderr itself is full: only the exit code can report it.
        _silence(sys.stderr)
    return ExitCode.BAD_INPUT if full else ExitCode.BUG


def _our_bug(error: Exception, *, verbose: bool) -> int:
    import traceback

    from moe_optimizer.cli.messages import write_error_lines
    from moe_optimizer.errors import ExitCode

    write_error_lines(
        f"internal error: {type(error).__name__}: {error}",
        hint="this is a bug in moe-optimizer; please report it"
        + ("" if verbose else " with the traceback that --verbose prints"),
    )
    if verbose:
        traceback.print_exception(error)
    return ExitCode.BUG


def _asks_for_verbose(arguments: Sequence[str]) -> bool:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--verbose" in own


def _silence(stream: object) -> None:
    """Redirect `stream` to /dev/null, so that the interpreter's flush at exit does not fail again."""
    try:
        descriptor = stream.fileno()  # pyrefly: ignore[missing-attribute] - None, or what a caller put there
    except (AttributeError, OSError, ValueError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
