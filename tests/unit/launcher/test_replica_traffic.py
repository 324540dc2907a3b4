"""Whether the router's requests are seen to reach every server. Servers and router are stand-ins without HTTP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.launcher.replica_traffic import observed_traffic, prompt_tokens


class Server:
    """Counts the prompt tokens it is given, as vLLM publishes them."""

    def __init__(self, title: str, *, publishes: bool = True) -> None:
        self.title, self.client, self.taken, self._publishes = title, self, 5, publishes

    def metrics(self) -> str:
        line = f'vllm:prompt_tokens_total{{engine="0",model_name="m"}} {self.taken}.0'
        return f"# HELP vllm:prompt_tokens_total Tokens\n{line if self._publishes else ''}\n"


def deployment(*servers: Server, dealt_to: tuple[int, ...] = ()) -> Any:
    """Servers behind a router that deals requests to those numbers in turn."""
    turns = iter(dealt_to)

    def complete(prompt: str, **_: Any) -> None:
        servers[next(turns)].taken += len(prompt)

    return SimpleNamespace(servers=servers, router=SimpleNamespace(client=SimpleNamespace(complete=complete)))


def test_servers_that_all_take_a_request_are_running() -> None:
    seen = observed_traffic(deployment(Server("a server"), Server("b server"), dealt_to=(1, 0)))
    assert (seen.ran, seen.why_not) == ("yes, 2 servers", "")


def test_a_server_that_gets_nothing_is_named() -> None:
    seen = observed_traffic(deployment(Server("a server"), Server("b server"), dealt_to=(0, 0)))
    assert seen.ran == "no"
    assert "b server" in seen.why_not
    assert "a server" not in seen.why_not


def test_servers_without_counts_show_nothing() -> None:
    seen = observed_traffic(deployment(Server("a server"), Server("b server", publishes=False), dealt_to=(0, 1)))
    assert seen.ran == "no"
    assert "--disable-log-stats" in seen.why_not


def test_a_router_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = deployment(Server("a server"), dealt_to=(0,))

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError("no router")

    monkeypatch.setattr(broken.router.client, "complete", refuse)
    assert observed_traffic(broken).why_not.endswith(": no router")


def test_the_counts_of_all_engines_are_added_and_others_are_not() -> None:
    lines = (
        'vllm:prompt_tokens_total{engine="0"} 3.0',
        'vllm:prompt_tokens_total{engine="1"} 4.0',
        'vllm:prompt_tokens_total_created{engine="0"} 9.0',
    )
    client: Any = SimpleNamespace(metrics=lambda: "\n".join(lines))
    assert prompt_tokens(client) == 7
