"""Ports for servers that a test starts."""

from __future__ import annotations

import random
import socket

# Below the range from which the kernel takes ports for whoever asks for any: a server binds its port seconds after the
# test has chosen it, and in between nobody else may be given it.
_RANGE = range(20_000, 32_000)

_reserved: list[socket.socket] = []


def free_port() -> int:
    """Return a port that nobody listens on, and that no other test here is given while this process lives."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """Return the first of so many such ports in a row: a group takes one for each server, and two for its router."""
    for _ in range(1000):
        first = random.randrange(_RANGE.start, _RANGE.stop - count)
        names: list[socket.socket] = []
        # Reserved first: a look at a port keeps it, for a moment, from the server of whoever was given it.
        if all(_reserve(port, names) and _can_listen(port) for port in range(first, first + count)):
            _reserved.extend(names)
            return first
        for name in names:
            name.close()
    raise AssertionError(f"no {count} free ports in a row in {_RANGE}")


def _can_listen(port: int) -> bool:
    with socket.socket() as probe:
        # As a server does: the last connections of an earlier one do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
        return True


def _reserve(port: int, names: list[socket.socket]) -> bool:
    """Take a name that only one socket of this machine can have; the kernel frees it when this process ends."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0moe-optimizer-test-port-{port}")
    except OSError:
        name.close()
        return False
    names.append(name)
    return True
