"""The liveness probe: a server that has requests and makes no steps is not alive."""

from __future__ import annotations

from typing import Any

import pytest

from moe_optimizer.launcher import progress_probe
from moe_optimizer.launcher.http_client import ServerClient


@pytest.mark.parametrize(
    ("running", "ages", "paused", "code"),
    [
        (0, (900,), False, 0),
        ("0.0\nmoe_optimizer_unfinished_requests 1", (900,), False, 1),
        (2, (1, 900), False, 0),
        (2, (61, 900), False, 1),
        (2, (61, 900), True, 0),
        (2, (), False, 0),
        (None, (), False, 1),
    ],
)
def test_only_requests_without_steps_end_it(
    monkeypatch: pytest.MonkeyPatch, running: object, ages: tuple[int, ...], paused: bool, code: int
) -> None:
    def page(self: ServerClient, **options: Any) -> str:
        if running is None:
            raise ConnectionRefusedError
        steps = [f'{progress_probe.AGE_METRIC}{{rank="{rank}"}} {age}.0' for rank, age in enumerate(ages)]
        return "\n".join([f'vllm:num_requests_running{{engine="0"}} {running}.0', *steps, ""])

    monkeypatch.setattr(ServerClient, "metrics", page)
    monkeypatch.setattr(ServerClient, "paused", lambda self: paused)
    assert progress_probe.main(1) == code
