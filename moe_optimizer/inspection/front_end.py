"""Keeps what an API server of this machine took for each token, as `bench` found it, for later plans."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text, write_atomically
from moe_optimizer.inspection.cpu_probe import probe_cpu
from moe_optimizer.plan.json_codec import decode_text
from moe_optimizer.resources import cache_dir
from moe_optimizer.specs.quantity import Quantity, Source

SCHEMA_VERSION = 1
_MAX_FILE_BYTES = 10_000
_FILE = "front_end.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """What the API server of a busy server took."""

    us_per_token: float
    """Time between two tokens of a request over the requests that each API server answered, in microseconds."""
    found: str
    """When, and under which load."""
    cpu: str
    vllm: str
    schema_version: int = SCHEMA_VERSION


def keep_front_end(us_per_token: float, *, found: str, vllm: str, cache: Path | None = None) -> Path:
    """Write it for later plans of this machine and version of vLLM, in place of what was known, and return the file."""
    path = (cache_dir() if cache is None else cache) / _FILE
    said = FrontEnd(us_per_token=us_per_token, found=found, cpu=probe_cpu().name, vllm=vllm)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(said), indent=1) + "\n")
    return path


def read_front_end(vllm: str, cache: Path | None = None) -> Quantity | None:
    """Return what is known of this machine and version of vLLM, in us; None: nothing, or a file that cannot be read."""
    path = (cache_dir() if cache is None else cache) / _FILE
    try:
        text = read_text(path, max_bytes=_MAX_FILE_BYTES, name=path.name)
        said = decode_text(FrontEnd, text, origin=path.name, schema_version=SCHEMA_VERSION)
    except (InputError, OSError):
        return None
    if (said.cpu, said.vllm) != (probe_cpu().name, vllm) or not said.us_per_token > 0:
        return None
    return Quantity(said.us_per_token, "us", Source.MEASURED, f"`bench` on this machine, {said.found}")
