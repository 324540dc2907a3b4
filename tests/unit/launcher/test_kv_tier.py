"""Whether servers are seen to copy cache blocks to host memory. The servers are stand-ins without HTTP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.launcher import kv_tier
from moe_optimizer.launcher.kv_tier import observed_tier

PAGE = 'vllm:prompt_tokens_total{engine="0"} 26.0\n'


class Server:
    """Has copied so many bytes when it is asked for the first time, for the second and so on."""

    def __init__(self, title: str, *stored: int, page: str = PAGE) -> None:
        self.title, self.client, self._page, self._stored = title, self, page, list(stored)
        self._asked = 0

    def metrics(self) -> str:
        self._asked += 1
        # The first page is looked at for whether there are counts at all.
        size = self._stored[min(max(0, self._asked - 2), len(self._stored) - 1)] if self._stored else 0
        return self._page + (f'vllm:kv_offload_store_bytes_total{{engine="0"}} {size}.0\n' if size else "")


def observed(*servers: Any) -> Any:
    return observed_tier(SimpleNamespace(servers=servers))  # pyrefly: ignore[bad-argument-type]


def test_servers_that_all_copy_are_running_also_when_one_comes_later() -> None:
    seen = observed(Server("a server", 4096), Server("b server", 0, 8192))
    assert (seen.ran, seen.why_not) == ("yes, 4096 bytes or more in each host tier", "")


def test_a_server_that_copies_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_tier, "WAIT_S", 0.0)
    seen = observed(Server("a server", 4096), Server("b server"))
    assert seen.ran == "no"
    assert seen.why_not.endswith("host memory: b server")


def test_servers_without_counts_show_nothing() -> None:
    assert "--disable-log-stats" in observed(Server("a server", 4096), Server("b server", page="")).why_not


def test_a_server_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Server("a server", 4096)

    def refuse() -> str:
        raise ConnectionRefusedError("no server")

    monkeypatch.setattr(broken, "metrics", refuse)
    assert observed(broken).why_not.endswith(": no server")
