"""Keeps how long the last start of stock vLLM took here, so that a start of ours can be shown beside it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_json, write_atomically
from moe_optimizer.launcher.compile_caches import compiler_versions
from moe_optimizer.launcher.server_info import ServerInfo
from moe_optimizer.plan.json_codec import decode, encode
from moe_optimizer.plan.plan import Plan
from moe_optimizer.resources import cache_dir

_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StockStart:
    """A start of stock vLLM that a measurement made."""

    date: str
    start_up_s: float
    phases_s: Mapping[str, float]
    """As of our own starts."""
    serve_args: tuple[str, ...]

    def in_words(self) -> str:
        """Return when and how long."""
        return f"{self.date[:10]}, ready after {self.start_up_s:.0f} s, as `bench` or `tune` started it"


def keep_stock_start(plan: Plan, info: ServerInfo) -> None:
    """Note a start of stock vLLM by a plan; a folder that takes no file is no reason to end a measurement."""
    found = StockStart(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        start_up_s=info.start_up_s,
        phases_s=info.phases_s,
        serve_args=plan.serve_args.words,
    )
    with contextlib.suppress(OSError):
        write_atomically(_path(plan), json.dumps(encode(found)))


def last_stock_start(plan: Plan) -> StockStart | None:
    """Return the last start of stock vLLM with this plan's model, version of vLLM and machine; None: none is known."""
    path = _path(plan)
    try:
        return decode(StockStart, read_json(path, max_bytes=_MOST_BYTES), origin=str(path))
    except InputError:
        return None


def _path(plan: Plan) -> Path:
    hardware = plan.hardware
    machine = [hardware.gpu and hardware.gpu.name, plan.num_gpus, hardware.cpu and hardware.cpu.name]
    key = [compiler_versions(plan), machine, plan.model.path]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return cache_dir(os.environ) / "start_up" / f"{name}.stock.json"
