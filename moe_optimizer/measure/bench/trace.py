"""Draws the requests of a workload, and reads and writes traces: one JSON object a line.

The form is that of published traces (Mooncake) and of `vllm bench serve --dataset-name timed_trace`: `timestamp` in
seconds, `input_length` and `output_length` in tokens, and `hash_ids`, one id for each chunk of the prompt. Equal ids
are equal tokens, so that shared beginnings hit the prefix cache.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text
from moe_optimizer.measure.bench.workload import Workload

CHUNK_TOKENS = 16
"""Tokens of one id of `hash_ids`."""
_MAX_BYTES = 256 * 2**20
_IDS_OF_A_ROUND = 1_000_000_000
_ROUNDS = 100_000
"""More than a benchmark has."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it arrives (seconds after the first), its lengths in tokens, and its prompt's chunks."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """One point of a benchmark: clients in a closed loop, or requests per second; neither: a trace's own arrivals."""

    clients: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.clients is not None:
            return f"{self.clients} client{'s' if self.clients > 1 else ''}"
        return "trace" if self.rate is None else f"{self.rate:g} requests/s"


def loads_of(workload: Workload) -> tuple[Load, ...]:
    """Return the points at which a workload is measured."""
    return (*(Load(clients=each) for each in workload.clients), *(Load(rate=each) for each in workload.rates))


def draw(workload: Workload, load: Load, *, round_number: int, attempt: int = 0) -> tuple[TraceRequest, ...]:
    """Return the requests of one round: equal for equal arguments, and no prompt comes in two rounds.

    A prompt that came before would be in the prefix cache; only the shared prefix is meant to be. Another attempt at a
    round has the same times and lengths, and other prompts.
    """
    generator = random.Random(f"{workload.seed} {load} {round_number}")
    # Round and load have ids of their own: a chunk drawn twice would be a cache hit that nobody asked for.
    digits = random.Random(f"{load}").randrange(1000) + 1000 * (round_number + _ROUNDS * attempt)
    fresh = itertools.count(_IDS_OF_A_ROUND * (1 + digits))
    weights = [kind.share for kind in workload.requests]
    requests = []
    for timestamp in _arrivals(workload, load, generator):
        kind = generator.choices(workload.requests, weights)[0]
        prompt = generator.randint(kind.prompt.least, kind.prompt.most)
        output = generator.randint(kind.output.least, kind.output.most)
        chunks = -(-prompt // CHUNK_TOKENS)
        shared = _shared_ids(workload, generator)[:chunks]
        own = itertools.islice(fresh, chunks - len(shared))
        requests.append(TraceRequest(timestamp, prompt, output, (*shared, *own)))
    return tuple(requests)


def _arrivals(workload: Workload, load: Load, generator: random.Random) -> list[float]:
    if load.clients is not None:
        return [0.0] * (load.clients * workload.requests_per_client)
    assert load.rate is not None, "a workload has clients or rates"
    bursts, now = max(1, round(load.rate * workload.seconds / workload.burst)), 0.0
    times: list[float] = []
    for _ in range(bursts):
        times += [now] * workload.burst
        now += generator.expovariate(load.rate / workload.burst)
    return times


def _shared_ids(workload: Workload, generator: random.Random) -> tuple[int, ...]:
    shared = workload.shared_prefix
    if shared is None:
        return ()
    first = generator.randrange(shared.prefixes) * (shared.tokens // CHUNK_TOKENS)
    return tuple(range(first, first + shared.tokens // CHUNK_TOKENS))


def moved(requests: Iterable[TraceRequest], round_number: int, *, attempt: int = 0) -> tuple[TraceRequest, ...]:
    """Return the same requests with prompts of this round alone; what they share among themselves, they still share."""
    offset = _IDS_OF_A_ROUND * 1000 * (1 + round_number + _ROUNDS * attempt)
    return tuple(replace(each, hash_ids=tuple(offset + chunk for chunk in each.hash_ids)) for each in requests)


def write_trace(requests: Iterable[TraceRequest], path: Path) -> None:
    """Write a trace."""
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in requests), encoding="utf-8")


def read_trace(path: Path) -> tuple[TraceRequest, ...]:
    """Return the requests of a trace in a file; lines without `hash_ids` share nothing with others.

    Raises:
        InputError: it cannot be read, or a line is not a request; the message names the line.
    """
    fresh = itertools.count(_IDS_OF_A_ROUND)
    requests = []
    for number, line in enumerate(read_text(path, max_bytes=_MAX_BYTES).splitlines(), start=1):
        if line.strip():
            requests.append(_request(line, f"{path}:{number}", fresh))
    if not requests:
        raise InputError(f"{path}: got no requests, expected one JSON object a line")
    start = requests[0].timestamp
    if any(after.timestamp < before.timestamp for before, after in itertools.pairwise(requests)):
        raise InputError(f"{path}: timestamp: got times that go back, expected each at or after the one before")
    return tuple(
        TraceRequest(each.timestamp - start, each.input_length, each.output_length, each.hash_ids) for each in requests
    )


def _request(line: str, place: str, fresh: Iterable[int]) -> TraceRequest:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{place}: got {line:.60}, expected an object")
    prompt = _length(data, "input_length", place)
    chunks = -(-prompt // CHUNK_TOKENS)
    ids = data.get("hash_ids")
    if ids is None:
        ids = list(itertools.islice(iter(fresh), chunks))
    if not isinstance(ids, Sequence) or len(ids) < chunks or not all(isinstance(each, int) for each in ids):
        raise InputError(
            f"{place}: hash_ids: got {ids!s:.60}, expected {chunks} whole numbers, one for each {CHUNK_TOKENS} tokens"
        )
    return TraceRequest(_time(data, place), prompt, _length(data, "output_length", place), tuple(ids[:chunks]))


def _length(data: dict[str, Any], key: str, place: str) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{place}: {key}: got {value!r:.60}, expected a whole number from 1")
    return value


def _time(data: dict[str, Any], place: str) -> float:
    value = data.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InputError(f"{place}: timestamp: got {value!r:.60}, expected seconds, 0 or more")
    return float(value)
