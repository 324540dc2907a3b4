"""Stands in for vllm-router: hands each request to a prefill server and then to a decode server, of each in turns.

Usage: fake_router.py ROUTER_ARGS... with --prefill, --decode and --port among them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    options = list(itertools.pairwise(sys.argv[1:]))
    parts = [
        [int(value.rpartition(":")[2]) for flag, value in options if flag == part] for part in ("--prefill", "--decode")
    ]
    turns = [itertools.cycle(ports) for ports in parts]
    with socket.create_server(("127.0.0.1", int(dict(options)["--port"]))) as listener:
        while True:
            connection, _ = listener.accept()
            with contextlib.suppress(ConnectionError), connection:
                request, answer = received(connection), b""
                # Only what is to be computed takes turns.
                computes = request.startswith(b"POST")
                for ports, turn in zip(parts, turns, strict=True):
                    answer = forwarded(request, next(turn) if computes else ports[0])
                connection.sendall(answer)


def received(connection: socket.socket) -> bytes:
    """Return a request as it came, with its body."""
    with connection.makefile("rb") as stream:
        lines = [stream.readline()]
        length = 0
        while lines[-1].strip():
            lines.append(stream.readline())
            name, _, value = lines[-1].partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return b"".join(lines) + stream.read(length)


def forwarded(request: bytes, port: int) -> bytes:
    """Return what the server there answers; it closes the connection after."""
    with socket.create_connection(("127.0.0.1", port)) as server:
        server.sendall(request)
        with server.makefile("rb") as stream:
            return stream.read()


if __name__ == "__main__":
    main()
