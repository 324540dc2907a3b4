"""Keeps what an API server of this machine took for each token, as `bench` found it, for later plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The file: of one processor and one version of vLLM."""

    cpu: str
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
    if (kept.cpu, kept.vllm) != (probe_cpu().name, vllm):
        return FrontEnd()
    return FrontEnd(times=tuple(each for each in kept.times if each.clients > 0 and each.us_per_token > 0))


def keep_front_end(
    measured: Sequence[FrontEndTime], at_most: Sequence[FrontEndTime], *, vllm: str, cache: Path | None = None
) -> None:
    """Write what loads told for later plans of this machine with this version of vLLM.

    Args:
        measured: of API servers that their tokens waited for; each takes the place of what was known of so many
            clients.
        at_most: of API servers that kept up, the most that they can have taken. What was known of as many clients or
            fewer and is above it holds no longer.
        vllm: its version.
        cache: the folder; None: this package's.
    """
    known = {each.clients: each for each in read_front_end(vllm, cache).times}
    kept = known | {each.clients: each for each in measured}
    for bound in at_most:
        kept = {
            clients: each
            for clients, each in kept.items()
            if clients > bound.clients or each.us_per_token <= bound.us_per_token
        }
    if kept == known:
        return
    path = (cache_dir() if cache is None else cache) / _FILE
    times = tuple(kept[clients] for clients in sorted(kept))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(_Kept(cpu=probe_cpu().name, vllm=vllm, times=times)), indent=1) + "\n")
