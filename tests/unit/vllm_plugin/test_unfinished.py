"""How many requests an API server has handed to its engines, from vLLM's client of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from moe_optimizer.proof.record import UNFINISHED_METRIC
from moe_optimizer.vllm_plugin import unfinished


def client(engines: dict[str, Any], count: int = 3) -> Any:
    return SimpleNamespace(
        engine_core=SimpleNamespace(**engines),
        get_num_unfinished_requests=lambda: count,
        model_config=SimpleNamespace(served_model_name="m"),
    )


@pytest.mark.parametrize(
    ("engines", "counts"),
    [
        ({}, {"0": 3}),
        ({"engine_ranks_managed": [2]}, {"2": 3}),
        ({"engine_ranks_managed": [0, 1], "reqs_in_flight": {"a": b"\1\0", "b": b"\1\0"}}, {"0": 0, "1": 2}),
    ],
)
def test_each_engine_has_its_own(engines: dict[str, Any], counts: dict[str, int]) -> None:
    assert unfinished.unfinished_of(client(engines)) == counts


def test_the_page_shows_them_once_the_server_is_asked_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    own = CollectorRegistry()
    monkeypatch.setattr(unfinished, "Gauge", lambda *names, **more: Gauge(*names, registry=own, **more))
    monkeypatch.setattr(unfinished, "_shown", None)

    async def asked() -> None:
        for state in ({}, {"engine_client": client({})}, {"engine_client": client({})}):
            unfinished.show_unfinished(SimpleNamespace(state=SimpleNamespace(**state)))
        unfinished.show_unfinished(None)

    asyncio.run(asked())
    assert own.get_sample_value(UNFINISHED_METRIC, {"model_name": "m", "engine": "0"}) == 3
