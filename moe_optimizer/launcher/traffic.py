"""Reads how many requests a server has and whether it gets on with them, from its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.metrics_page import samples
from moe_optimizer.proof.record import UNFINISHED_METRIC

_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_FINISHED, _AWAKE = "vllm:request_success_total", "vllm:engine_sleep_state"
# The cache fills with every step of a long prompt, whose tokens are counted only at its end.
_STEPS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:kv_cache_usage_perc")
_TIMEOUT_S = 2.0
"""Chosen: a server that takes longer is asked again, and at its end not waited for."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a server, or one engine of it, had to do at one moment."""

    unfinished: int
    """Requests that run or wait, also if the engine knows nothing of them yet."""
    finished: int
    """Since its start, its warm-up included."""
    progress: tuple[float, ...]
    """Differs between two moments if anything was computed between them."""
    asleep: bool = False
    """Its requests wait on purpose (vLLM's sleep)."""


def read_traffic(client: ServerClient) -> Mapping[str, Traffic] | None:
    """Return the traffic of each engine of a server, by its number; None: the server does not count it.

    With several API servers an engine appears with its first request.

    Raises:
        OSError: it does not answer.
    """
    names = (_RUNNING, _WAITING, _FINISHED, _AWAKE, UNFINISHED_METRIC, *_STEPS)
    page = client.metrics(*names, timeout_s=_TIMEOUT_S)
    if _RUNNING not in page:
        return None
    engines: dict[str, dict[str, float]] = {}
    for sample in (*samples(page, "vllm:"), *samples(page, UNFINISHED_METRIC)):
        if sample.name in names and sample.labels.get("sleep_state", "awake") == "awake":
            values = engines.setdefault(sample.labels.get("engine", "0"), {})
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return {number: _traffic(values) for number, values in engines.items() if _RUNNING in values}


def read_router(client: ServerClient) -> None:
    """Look whether a router answers, which gets on for as long as it does: it computes and counts nothing.

    Raises:
        OSError: it does not answer.
    """
    if not client.healthy(timeout_s=_TIMEOUT_S):
        raise TimeoutError(f"{client.base_url}/health does not answer 200")


def _traffic(values: Mapping[str, float]) -> Traffic:
    known = values[_RUNNING] + values.get(_WAITING, 0.0)
    unfinished = round(max(known, values.get(UNFINISHED_METRIC, 0.0)))
    # Not ours: a request that comes is no progress.
    progress = (known, *(values.get(name, 0.0) for name in (_FINISHED, *_STEPS)))
    return Traffic(unfinished, round(values.get(_FINISHED, 0.0)), progress, values.get(_AWAKE) == 0.0)
