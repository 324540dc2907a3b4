"""Ports for servers that a test starts."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def four_free_ports() -> int:
    """Return the first of four ports in a row that nobody listens on: a group of servers takes as many."""
    for _ in range(100):
        # Below the range from which the kernel takes ports for outgoing connections.
        first = random.randrange(20_000, 32_000)
        if all(_is_free(port) for port in range(first, first + 4)):
            return first
    raise AssertionError("no four free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
