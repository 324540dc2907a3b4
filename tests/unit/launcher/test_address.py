"""Where the server listens."""

from __future__ import annotations

import re
import socket

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.launcher.address import base_url, reserved, server_address, who_is_answered
from moe_optimizer.plan.serve_args import ServeArguments
from tests.free_ports import free_port


def test_host_and_port_are_read_from_the_arguments() -> None:
    assert server_address(ServeArguments("--host", "0.0.0.0", "--port=81")) == ("0.0.0.0", 81)
    assert server_address(ServeArguments()) == ("127.0.0.1", 8000)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_of_a_server_that_others_cannot_reach_nothing_is_said(host: str) -> None:
    assert who_is_answered(host, None) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_of_a_server_without_a_key_that_others_reach_it_is_said(host: str) -> None:
    assert re.match(rf"whoever.*{host}.*: VLLM_API_KEY", who_is_answered(host, None))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_what_answers_without_the_key_is_said(host: str) -> None:
    said = who_is_answered(host, "sesame")
    assert "/metrics" in said
    assert "sesame" not in said


def test_a_port_that_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match="--port: got 'http'"):
        server_address(ServeArguments("--port", "http"))


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"{port} on 127.0.0.1"), reserved([("127.0.0.1", port)]):
            pass


def test_a_reserved_port_is_refused_until_it_is_free_again() -> None:
    address, other = ("127.0.0.1", free_port()), ("127.0.0.1", free_port())
    taken = f"{address[1]} on 127.0.0.1: another moe-optimizer serve is starting"
    with reserved([address]):
        with pytest.raises(InputError, match=taken), reserved([other, address]):
            pass
        with reserved([other]):
            pass
    with reserved([address]):
        pass


def test_a_host_that_is_not_here_is_refused() -> None:
    with pytest.raises(InputError, match=r"^--host: 192\.0\.2\.1: "), reserved([("192.0.2.1", 8000)]):
        pass


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
    ],
)
def test_the_url_reaches_the_server_from_here(host: str, url: str) -> None:
    assert base_url(host, 8000) == url
