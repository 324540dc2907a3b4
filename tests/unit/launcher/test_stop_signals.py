"""Which signals are stop requests, and how many."""

from __future__ import annotations

import signal

import pytest

from moe_optimizer.launcher.stop_signals import collected_stops

pytestmark = pytest.mark.usefixtures("heeded_signals")


def test_every_interrupt_counts_and_a_closed_terminal_once() -> None:
    with collected_stops() as stops:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
    assert stops == [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]


def test_a_closed_terminal_does_not_stop_what_was_started_with_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with collected_stops() as stops:
        signal.raise_signal(signal.SIGHUP)
    assert stops == []
