"""Times the calls that count tokens per expert by themselves, without a server."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

_LAYERS = 48


def added_work(batch: int, *, num_experts: int, top_k: int) -> dict[str, float]:
    """Return the microseconds that counting adds: a layer plain, a layer in a compiled graph, and a step."""
    import torch

    from moe_optimizer.vllm_plugin.expert_load.capture import Counting
    from moe_optimizer.vllm_plugin.expert_load.counter import LayerwiseCounter
    from moe_optimizer.vllm_plugin.expert_load.writer import ExpertLoadWriter

    layers = range(_LAYERS)
    counter = LayerwiseCounter(layers, num_experts, top_k=top_k, max_rows=8192)
    ids = [torch.randint(0, num_experts, (batch, top_k)) for _ in layers]

    def forward(*ids: torch.Tensor) -> None:
        for layer_id, each in zip(layers, ids, strict=True):
            counter.capture(layer_id, each)

    compiled = torch.compile(forward, fullgraph=True)

    writer = ExpertLoadWriter(
        counter, model="", layers=(), since="2026-01-01T00:00:00Z", path=None, on_seen=lambda: None
    )
    # Of a session it reads whether the launcher still warms up, and tells it failures.
    session = SimpleNamespace(run_dir=Path(tempfile.gettempdir()) / "no launcher warms up here")
    counting = Counting(cast("Any", session), counter, writer)
    scheduled = SimpleNamespace(total_num_scheduled_tokens=batch)

    def step() -> None:
        with counting.step(scheduled):
            pass

    return {
        "layer_us_plain": _microseconds(lambda: forward(*ids)) / len(layers),
        "layer_us_compiled": _microseconds(lambda: compiled(*ids)) / len(layers),
        "step_us": _microseconds(step),
    }


def _microseconds(work: Callable[[], None]) -> float:
    """Return the median time of a call, after a hundred uncounted ones."""
    times = []
    for repetition in range(1100):
        start = time.perf_counter()
        work()
        if repetition >= 100:
            times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def added_shares(work: dict[str, float] | None, layers: int, step_s: float) -> dict[str, float] | None:
    """Return `work` with what it is of a step of `layers` layers that takes `step_s` without it."""
    if work is None:
        return None
    shares = {
        kind: (layers * work[f"layer_us_{kind}"] + work["step_us"]) / (1e6 * step_s) for kind in ("compiled", "plain")
    }
    return work | {f"share_{kind}": share for kind, share in shares.items()}
