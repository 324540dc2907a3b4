"""Keeps what an API server of this machine took for each token, as `bench` found it, for later plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text, write_atomically
from moe_optimizer.inspection.cpu_probe import probe_cpu
from moe_optimizer.plan.json_codec import decode_text
from moe_optimizer.resources import cache_dir
from moe_optimizer.specs.front_end import FrontEnd, FrontEndTime

SCHEMA_VERSION = 1
_MAX_FILE_BYTES = 100_000
_FILE = "front_end.json"
_MOST_US = 1e6
"""Chosen: a token takes no second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The file: of one processor, as many cores as this process may use, and one version of vLLM."""

    cpu: str
    cores: int
    vllm: str
    times: tuple[FrontEndTime, ...]
    schema_version: int = SCHEMA_VERSION


def read_front_end(vllm: str, cache: Path | None = None) -> FrontEnd:
    """Return what is known of this machine with a version of vLLM; of a file that cannot be read nothing."""
    path = (cache_dir() if cache is None else cache) / _FILE
    try:
        text = read_text(path, max_bytes=_MAX_FILE_BYTES, name=path.name)
        kept = decode_text(_Kept, text, origin=path.name, schema_version=SCHEMA_VERSION)
    except (InputError, OSError):
        return FrontEnd()
    cpu = probe_cpu()
    if (kept.cpu, kept.cores, kept.vllm) != (cpu.name, cpu.cores, vllm):
        return FrontEnd()
    times = {each.clients: each for each in kept.times if _is_a_time(each)}
    return FrontEnd(times=tuple(times[clients] for clients in sorted(times)))


def _is_a_time(time: FrontEndTime) -> bool:
    return time.clients > 0 and 0 < time.us_per_token <= _MOST_US and time.found.isprintable()


def keep_front_end(
    measured: Sequence[FrontEndTime], at_most: Sequence[FrontEndTime], *, vllm: str, cache: Path | None = None
) -> None:
    """Write what loads told for later plans of this machine with this version of vLLM.

    Args:
        measured: of API servers that their tokens waited for; each takes the place of what was known of so many
            clients.
        at_most: of API servers that kept up, the most that they can have taken. What was known of as many clients or
            fewer comes down to it.
        vllm: its version.
        cache: the folder; None: this package's.
    """
    known = {each.clients: each for each in read_front_end(vllm, cache).times}
    kept = known | {each.clients: each for each in measured}
    for bound in at_most:
        for clients, each in kept.items():
            if clients <= bound.clients and each.us_per_token > bound.us_per_token:
                kept[clients] = replace(bound, clients=clients)
    if kept == known:
        return
    path = (cache_dir() if cache is None else cache) / _FILE
    times = tuple(kept[clients] for clients in sorted(kept))
    path.parent.mkdir(parents=True, exist_ok=True)
    cpu = probe_cpu()
    made = _Kept(cpu=cpu.name, cores=cpu.cores, vllm=vllm, times=times)
    write_atomically(path, json.dumps(asdict(made), indent=1) + "\n")
