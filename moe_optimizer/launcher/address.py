"""Reads the address that a server listens on, checks that it is free, and reserves it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterable, Iterator

from moe_optimizer.errors import InputError
from moe_optimizer.plan.serve_args import ServeArguments

_DEFAULT_PORT = "8000"
_ANOTHER_PORT = "choose another one with --port"


def server_address(serve_args: ServeArguments) -> tuple[str, int]:
    """Return the host and port that arguments of `vllm serve` name; vLLM's default port where they do not.

    Raises:
        InputError: the port is not a number.
    """
    port = serve_args.value("--port") or _DEFAULT_PORT
    if not port.isdecimal():
        raise InputError(f"--port: got {port!r:.80}, expected a number")
    return serve_args.value("--host") or "127.0.0.1", int(port)


@contextlib.contextmanager
def reserved(addresses: Iterable[tuple[str, int]]) -> Iterator[None]:
    """Keep other launchers of this machine away from these hosts and ports while the block lasts.

    A server listens only once its model is loaded, and until then others can have the port: the launcher of a second
    server would take the first one's answers for its own server's.

    Raises:
        InputError: a port is taken or reserved, or a host is not an address of this machine.
    """
    with contextlib.ExitStack() as held:
        for host, port in addresses:
            family, address = _resolved(host, port)
            _check_free(family, address, host, port)
            held.enter_context(_claimed(address, host, port))
        yield


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return the family and the address of a socket for this host and port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise InputError(f"--host {host!r:.80}, port {port}: {getattr(error, 'strerror', None) or error}") from None
    return family, address  # pyrefly: ignore[bad-return] - IPv6 has two more members


def _check_free(family: socket.AddressFamily, address: tuple[str, int], host: str, port: int) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the server does: a port in TIME_WAIT after the last server counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise InputError(
                    f"--host: {host}: {error.strerror}", hint="give an address of this machine, or 0.0.0.0 for all"
                ) from None
            raise InputError(f"--port: {port} on {host}: {error.strerror}", hint=_ANOTHER_PORT) from None


def _claimed(address: tuple[str, int], host: str, port: int) -> socket.socket:
    """Return a socket that holds the claim until it is closed or this process ends."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        # No file: the leading zero makes it a name in the kernel, in the same network namespace as the port.
        claim.bind(f"\0moe-optimizer/{address[0]}/{port}")
    except OSError:
        claim.close()
        raise InputError(
            f"--port: {port} on {host}: another moe-optimizer serve is starting or serving there", hint=_ANOTHER_PORT
        ) from None
    return claim


def who_is_answered(host: str, key: str | None) -> str:
    """Return a sentence about who can use a server that listens at `host`; "" where only users of this machine can.

    Args:
        host: a name or address, as the server is given it.
        key: its API key, which vLLM asks for under /v1 and a few other paths only.
    """
    if key:
        return "the API key is asked for under /v1; what lies elsewhere, such as /metrics, answers without it"
    if ipaddress.ip_address(_resolved(host, 0)[1][0]).is_loopback:
        return ""
    return f"whoever reaches {host} can use it: VLLM_API_KEY in the environment has vLLM ask for a key"


def base_url(host: str, port: int) -> str:
    """Return the URL under which this machine reaches the server."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
