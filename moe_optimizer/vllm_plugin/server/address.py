"""Where a server listens, and whether it could."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from moe_optimizer.errors import InputError
from moe_optimizer.plan.serve_args import flag_value

_DEFAULT_PORT = "8000"


def server_address(serve_args: Sequence[str]) -> tuple[str, int]:
    """Return the host and port that arguments of `vllm serve` name; vLLM's default port where they do not.

    Raises:
        InputError: the port is not a number.
    """
    port = flag_value(serve_args, "--port") or _DEFAULT_PORT
    if not port.isdecimal():
        raise InputError(f"--port: got {port!r:.80}, expected a number")
    return flag_value(serve_args, "--host") or "127.0.0.1", int(port)


def check_address(host: str, port: int) -> None:
    """Refuse an address that this process could not listen on either.

    Raises:
        InputError: the port is taken or reserved, or the host is not an address of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise InputError(f"--host {host!r:.80}, port {port}: {getattr(error, 'strerror', None) or error}") from None
    with socket.socket(family, kind) as probe:
        # As the server does: a port in TIME_WAIT after the last server is not taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise InputError(
                    f"--host: {host}: {error.strerror}", hint="give an address of this machine, or 0.0.0.0 for all"
                ) from None
            raise InputError(
                f"--port: {port} on {host}: {error.strerror}", hint="choose another one with --port"
            ) from None


def base_url(host: str, port: int) -> str:
    """Return the URL under which this machine reaches the server."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
