"""Prompts of any length: the server is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.serving import any_lengths

SERVERS = [("http://one", "m", 500, 4096), ("http://two", "m", 500, 128)]


def test_every_server_gets_short_and_long_prompts_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, list[int]] = {url: [] for url, *_ in SERVERS}

    def streamed(url: str, _model: str, prompt: list[int], tokens: int) -> Iterator[bytes]:
        assert all(5 <= token < 500 for token in prompt)
        sent[url].append(len(prompt) + tokens)
        yield b""

    monkeypatch.setattr(any_lengths, "streamed", streamed)
    any_lengths.drive(SERVERS, 0.05)
    assert min(sent["http://one"]) < 100 < 1000 < max(sent["http://one"]) <= 4096
    assert max(sent["http://two"]) <= 128


def test_a_request_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def streamed(*_: object) -> Iterator[bytes]:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(any_lengths, "streamed", streamed)
    with pytest.raises(ConnectionRefusedError):
        any_lengths.drive(SERVERS, 0.05)
