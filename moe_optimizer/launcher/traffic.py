"""Reads how many requests a server has and whether they get on, from its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.metrics_page import samples

_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_FINISHED = "vllm:request_success_total"
# The cache fills with every step of a long prompt, whose tokens are counted only at its end.
_STEPS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:kv_cache_usage_perc")
_TIMEOUT_S = 2.0
"""Chosen: a server that takes longer is asked again, and at its end not waited for."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a server had to do at one moment."""

    unfinished: int
    """Requests that run or wait."""
    finished: int
    """Since its start, its warm-up included."""
    progress: tuple[float, ...]
    """Differs between two moments if anything was computed between them."""


def read_traffic(client: ServerClient) -> Traffic | None:
    """Return the traffic of a server; None: it does not count it.

    Raises:
        OSError: it does not answer.
    """
    page = client.metrics(_RUNNING, _WAITING, _FINISHED, *_STEPS, timeout_s=_TIMEOUT_S)
    values: dict[str, float] = {}
    for sample in samples(page, "vllm:"):
        values[sample.name] = values.get(sample.name, 0.0) + sample.value
    if _RUNNING not in values:
        return None
    unfinished = round(values[_RUNNING] + values.get(_WAITING, 0.0))
    finished = round(values.get(_FINISHED, 0.0))
    return Traffic(unfinished, finished, (unfinished, finished, *(values.get(name, 0.0) for name in _STEPS)))
