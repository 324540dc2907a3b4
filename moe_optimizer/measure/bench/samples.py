"""Holds what one round of requests gave, before anything is computed from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.errors import ServerFailedError
from moe_optimizer.files import read_json
from moe_optimizer.measure.bench.trace import TraceRequest
from moe_optimizer.plan.json_codec import decode

_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSamples:
    """A value for each request of a round, in the order of its trace; times in seconds."""

    duration_s: float
    ttft_s: tuple[float, ...]
    """Time to the first token."""
    e2e_s: tuple[float, ...]
    """Time to the last token."""
    itl_s: tuple[float, ...]
    """Times between two answers of a stream, of all requests together."""
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    errors: tuple[str, ...]
    """Empty for a request that succeeded."""
    energy_j: float | None
    """Of all GPUs of the machine; None where they do not count it."""
    compilations: int = 0
    """Kernels and graphs that were seen to be compiled meanwhile."""
    api_servers_s: tuple[tuple[float, ...], ...] | None = None
    """Seconds of a processor of each API server of each server; None where they cannot be read."""

    @property
    def tpot_s(self) -> tuple[float, ...]:
        """Time per output token of each request with more than one: from its first token to its last."""
        rows = zip(self.ttft_s, self.e2e_s, self.output_tokens, strict=True)
        return tuple((end - first) / (tokens - 1) for first, end, tokens in rows if tokens > 1)


def read_samples(path: Path) -> RoundSamples:
    """Read the samples of a round.

    Raises:
        InputError: they cannot be read.
    """
    return decode(RoundSamples, read_json(path, max_bytes=_MAX_BYTES), origin=str(path))


def check_samples(samples: RoundSamples, requests: tuple[TraceRequest, ...], *, title: str) -> None:
    """Refuse a round that must not count: a table of it would be green although the server failed.

    Raises:
        ServerFailedError: a request failed, or its completion has another length than was asked for.
    """
    failed = [error for error in samples.errors if error]
    if failed or len(samples.errors) != len(requests):
        count = len(requests) - len(samples.errors) + len(failed)
        # vLLM's load generator keeps tracebacks, which end in what happened.
        why = (failed[0].strip() or failed[0]).splitlines()[-1] if failed else "no answer"
        raise ServerFailedError(f"{title}: {count} of {len(requests)} requests failed: {why:.300}")
    wanted = [each.output_length for each in requests]
    wrong = [pair for pair in zip(samples.output_tokens, wanted, strict=True) if pair[0] != pair[1]]
    if wrong:
        raise ServerFailedError(
            f"{title}: {len(wrong)} of {len(requests)} completions: got {wrong[0][0]} tokens, expected {wrong[0][1]}"
        )
