"""Reads what API servers take of a processor: vLLM's processes that take requests in and send tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from moe_optimizer.measure.bench.samples import RoundSamples

BUSY = 0.6
"""Chosen: the share of a core from which a user is told. A process that everything waits for is not busy all the time,
as GPUs and clients wait in turns: those that slices of a DeepSeek-like shape waited for were for 65 to 88 %."""
SATURATED = 0.8
"""Chosen: the share of a core from which tokens count as waiting for the process; what it took for one is a quarter too
much at most then. Those that held up servers with 512 clients at once were busy for 84 to 103 %
(benchmarks/records/2026-11-28_h200_front_end_one.json, 2026-11-28_h200_x2_layouts_front_end.json), those that kept up
for 67 % at most."""
_TITLE = "::APIServer_"
"""In the names that vLLM gives its API servers where it starts several."""
_RUST = "--listen-fd"
"""An argument of vLLM's front end in Rust alone."""
_US = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServers:
    """What the API servers of a side took under a load."""

    servers: int = 1
    processes: int
    """Of each server."""
    us_per_token: float
    """Microseconds of a processor for each output token, of all together; what requests and their prompts took is in
    it."""
    core_share: float
    """Share of the time that each was busy on a core, on average; of several servers that of the busiest."""


def processor_seconds(servers: Sequence[int]) -> list[dict[int, float]] | None:
    """Return, for each server, its API servers (pid) and the seconds of a processor that each has taken so far.

    Args:
        servers: the first process of each. It is the API server itself, unless it has started some.

    Returns: None where there is no server, or one cannot be read.
    """
    try:
        return [
            {each.pid: sum(each.cpu_times()[:2]) for each in _api_servers(psutil.Process(pid))} for pid in servers
        ] or None
    except psutil.Error:
        return None


def _api_servers(server: psutil.Process) -> list[psutil.Process]:
    return [each for each in server.children(recursive=True) if _is_api_server(each)] or [server]


def _is_api_server(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:  # a helper that has ended meanwhile
        return False
    return _RUST in words or any(_TITLE in word for word in words[:1])


def seconds_between(
    before: Sequence[Mapping[int, float]] | None, after: Sequence[Mapping[int, float]] | None
) -> tuple[tuple[float, ...], ...] | None:
    """Return the seconds of each API server of each server; None where one is unknown or they are not the same."""
    if before is None or after is None or [each.keys() for each in before] != [each.keys() for each in after]:
        return None
    return tuple(
        tuple(end[pid] - start for pid, start in begun.items()) for begun, end in zip(before, after, strict=True)
    )


def use_of(rounds: Sequence[RoundSamples]) -> ApiServers | None:
    """Return what API servers took in some rounds; None where one does not say it, or had other numbers of them."""
    taken = [samples.api_servers_s for samples in rounds if samples.api_servers_s is not None]
    if len(taken) < len(rounds) or len({tuple(map(len, each)) for each in taken}) != 1:
        return None
    seconds = sum(samples.duration_s for samples in rounds)
    tokens = sum(sum(samples.output_tokens) for samples in rounds)
    of_servers = [(len(each[0]), sum(map(sum, each))) for each in zip(*taken, strict=True)]
    processes, busiest_s = max(of_servers, key=lambda each: each[1] / each[0])
    return ApiServers(
        servers=len(of_servers),
        processes=processes,
        us_per_token=_US * sum(taken_s for _, taken_s in of_servers) / tokens,
        core_share=busiest_s / processes / seconds,
    )
