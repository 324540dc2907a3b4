"""What a load tells of the stretches of time since a server was ready; the server is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import first_minutes as measured
from benchmarks.serving.first_minutes import OUTPUT_TOKENS, PROMPT_TOKENS, first_minutes


def test_requests_of_many_lengths_are_told_by_when_they_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    now = [0.0]

    def streamed(url: str, model: str, prompt: list[int], tokens: int) -> Iterator[bytes]:
        asked.append((len(prompt), tokens))
        now[0] += 0.01  # a busy machine would leave a stretch without a request
        yield from [b"{}"] * tokens

    monkeypatch.setattr(measured, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(measured, "streamed", streamed)
    monkeypatch.setattr(measured, "STRETCH_S", 0.2)
    found = first_minutes("http://x", "m", 1000, clients=2, seconds=0.4)
    assert [each["from_s"] for each in found["stretches"]] == [0.0, 0.2]
    assert len(found["requests"]) == len(asked)
    assert sum(each["requests"] for each in found["stretches"]) == len(asked)
    assert all(0 < each["ttft_ms_median"] <= each["ttft_ms_p99"] <= each["ttft_ms_most"] for each in found["stretches"])
    assert len(set(asked)) > 2
    assert all(PROMPT_TOKENS[0] <= prompt <= PROMPT_TOKENS[1] for prompt, _ in asked)
    assert all(OUTPUT_TOKENS[0] <= tokens <= OUTPUT_TOKENS[1] for _, tokens in asked)


def test_a_request_that_fails_fails_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_arguments: Any) -> Iterator[bytes]:
        raise ConnectionRefusedError

    monkeypatch.setattr(measured, "streamed", refused)
    with pytest.raises(ConnectionRefusedError):
        first_minutes("http://x", "m", 1000, clients=1, seconds=600.0)
