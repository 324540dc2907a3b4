"""SIGTERM and SIGHUP end a block as Ctrl-C does."""

from __future__ import annotations

import contextlib
import signal

import pytest

from moe_optimizer.cli.termination import clean_termination

pytestmark = pytest.mark.usefixtures("heeded_signals")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_runs_what_cleans_up_and_is_the_exit_code(number: signal.Signals) -> None:
    before, cleaned = signal.getsignal(number), []

    def work() -> None:
        with clean_termination(), contextlib.ExitStack() as stack:
            stack.callback(cleaned.append, True)
            signal.raise_signal(number)

    with pytest.raises(SystemExit) as caught:
        work()
    assert (caught.value.code, cleaned) == (128 + number, [True])
    assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with clean_termination():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
