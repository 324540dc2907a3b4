"""Results of a benchmark, computed from drawn samples as those of a real one are."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

from moe_optimizer.measure.bench.result import (
    BenchResult,
    Limits,
    MemoryUse,
    SideResult,
    load_result,
    verdicts,
    warm_up,
)
from moe_optimizer.measure.bench.samples import RoundSamples
from moe_optimizer.measure.bench.trace import Load

_REPETITIONS = 3
_TOKENS = 65


def bench_result(*, clients: tuple[int, ...] = (1, 16), slower: float = 1.2, **changes: Any) -> BenchResult:
    """Return the result of a plan against stock vLLM, which takes `slower` times as long for everything."""
    return dataclasses.replace(_drawn(clients, slower), **changes)


@functools.cache
def _drawn(clients: tuple[int, ...], slower: float) -> BenchResult:
    draw = random.Random(0)
    loads = [Load(clients=count) for count in clients]
    ours, stock = (
        {load: [_round(draw, load.clients or 1, factor) for _ in range(_REPETITIONS)] for load in loads}
        for factor in (1.0, slower)
    )
    return BenchResult(
        command=("moe-optimizer", "bench", "a-model", "--profile", "balanced"),
        date="2026-11-22T12:00:00+00:00",
        workload="chat",
        description="short questions",
        repetitions=_REPETITIONS,
        together=False,
        sides=(_side("balanced", ours), _side("stock", stock)),
        verdicts=tuple(verdicts(ours, stock)),
        environment={
            "model": "some/a-model",
            "device": "NVIDIA H100 80GB HBM3",
            "gpus": "1",
            "vllm": "0.26.0",
            "torch": "2.11.0",
            "driver": "580.1",
            "python": "3.11.7",
        },
    )


def _side(name: str, rounds: dict[Load, list[RoundSamples]]) -> SideResult:
    return SideResult(
        name=name,
        plan_digest="0" * 16,
        passes=(),
        ready_s=(50.0, 49.0),
        warm=warm_up([each[0] for each in rounds.values()], 0),
        memory=MemoryUse(gpu_bytes=None, process_bytes=1 << 30),
        loads=tuple(load_result(load, each, Limits(ttft_ms=500)) for load, each in rounds.items()),
    )


def _round(draw: random.Random, clients: int, factor: float) -> RoundSamples:
    count = 4 * clients
    first = [0.03 * factor * draw.lognormvariate(0, 0.1) for _ in range(count)]
    per_token = [0.005 * factor * draw.lognormvariate(0, 0.02) for _ in range(count)]
    end = [start + (_TOKENS - 1) * each for start, each in zip(first, per_token, strict=True)]
    return RoundSamples(
        duration_s=4 * max(end),
        ttft_s=tuple(first),
        e2e_s=tuple(end),
        itl_s=tuple(per_token),
        input_tokens=(100,) * count,
        output_tokens=(_TOKENS,) * count,
        errors=("",) * count,
        energy_j=None,
    )
