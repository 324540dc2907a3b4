"""Measures the time of a decode step at two servers in turn, and its quantiles."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from typing import Any

from benchmarks.serving.completions import streamed
from moe_optimizer.launcher.launch import ServerInfo

QUANTILES = (0.1, 0.25, 0.5)
SEED = 20261120

Rounds = list[list[float]]
"""Seconds between two tokens, a list for each round."""


def measure_in_turn(off: ServerInfo, on: ServerInfo, *, batch: int, tokens: int, rounds: int) -> dict[str, Rounds]:
    """Return the time of the steps at the server without ("off") and with the pass ("on").

    Both answer the same `batch` requests of `tokens` tokens in each round; which is first changes from round to round.
    Two rounds before the counted ones warm them up.
    """
    samples: dict[str, Rounds] = {"off": [], "on": []}
    for round_idx in range(-2, rounds):
        pair = (("off", off), ("on", on)) if round_idx % 2 else (("on", on), ("off", off))
        for name, server in pair:
            steps = _round(server, batch, tokens)
            if round_idx >= 0:
                samples[name].append(steps)
    return samples


def _round(server: ServerInfo, batch: int, tokens: int) -> list[float]:
    """Send `batch` requests at once; return the seconds between the tokens of each."""
    steps: list[list[float]] = []
    threads = [
        threading.Thread(target=lambda number=number: steps.append(_between_tokens(server, tokens, number)))
        for number in range(batch)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(steps) != batch:
        raise RuntimeError(f"{batch - len(steps)} of {batch} requests failed")
    return [seconds for request in steps for seconds in request]


def _between_tokens(server: ServerInfo, tokens: int, number: int) -> list[float]:
    """Return the seconds from one token to the next; a chunk of several tokens counts as so many equal steps."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    prompt = [10 + number, 20, 30, 40]
    arrivals: list[tuple[float, int]] = []
    for chunk in streamed(server.base_url, server.model, prompt, tokens, stream_options=usage):
        done = json.loads(chunk)["usage"]["completion_tokens"]
        if not arrivals or done > arrivals[-1][1]:
            arrivals.append((time.perf_counter(), done))
    if arrivals[-1][1] != tokens:
        raise RuntimeError(f"got {arrivals[-1][1]} tokens, expected {tokens}")
    steps = []
    for (before, had), (after, has) in itertools.pairwise(arrivals):
        steps += [(after - before) / (has - had)] * (has - had)
    return steps


def quantiles(samples: dict[str, Rounds]) -> dict[str, dict[str, Any]]:
    """Return the quantiles of both sides and their ratio with its 95 % interval."""
    generator = random.Random(SEED)
    rounds = range(len(samples["off"]))
    resampled = [generator.choices(rounds, k=len(rounds)) for _ in range(500)]
    rows = {}
    for quantile in QUANTILES:
        off, on = (quantile_of(samples[side], quantile) for side in ("off", "on"))
        ratios = sorted(
            quantile_of([samples["on"][each] for each in chosen], quantile)
            / quantile_of([samples["off"][each] for each in chosen], quantile)
            for chosen in resampled
        )
        rows[f"{quantile:.0%}"] = {
            "off_ms": 1e3 * off,
            "on_ms": 1e3 * on,
            "ratio": on / off,
            "ratio_interval_95": [ratios[12], ratios[-13]],
        }
    return rows


def quantile_of(rounds: Rounds, quantile: float) -> float:
    """Return a quantile of the steps of all rounds, in seconds."""
    values = sorted(itertools.chain.from_iterable(rounds))
    return values[int(quantile * (len(values) - 1))]


def whole_microseconds(rounds: Rounds) -> list[list[int]]:
    """Return the samples as a record holds them."""
    return [[round(1e6 * seconds) for seconds in each] for each in rounds]
