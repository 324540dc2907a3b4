"""What a running server counted for one request whose tokens are known."""

from __future__ import annotations

import dataclasses
import json
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.cli.experts import read_source
from moe_optimizer.errors import InputError
from moe_optimizer.inspection.expert_load import read_expert_load, read_run_load
from moe_optimizer.launcher.launch import ServerInfo
from moe_optimizer.specs.expert_load import LOAD_FILE, PARTS_DIR, ExpertLoad

PROMPT = tuple(range(100, 117))
MAX_TOKENS = 9
ROUTED_TOKENS = len(PROMPT) + MAX_TOKENS - 1
"""Tokens that pass through the model: the last one of an answer does not."""
_SETTLE_S = 300.0


@dataclass(frozen=True)
class Counted:
    """Routed tokens by layer and expert of the request alone, and what the server shows of all it counted."""

    request: tuple[tuple[int, ...], ...]
    merged: ExpertLoad
    """The run's expert_load.json."""
    parts: int
    """Processes that wrote counts."""
    on_metrics: ExpertLoad


def count_one_request(info: ServerInfo) -> Counted:
    """Send the request to a server that is otherwise idle, and read its counts before and after."""
    before = _settled(info.run_dir, more_than=-1)
    body = {
        "model": info.model,
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{info.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        assert json.load(response)["usage"]["completion_tokens"] == MAX_TOKENS
    after = _settled(info.run_dir, more_than=before.steps)
    merged = read_expert_load(info.run_dir / LOAD_FILE)
    return Counted(
        request=tuple(
            tuple(b - a for a, b in zip(old.tokens, new.tokens, strict=True))
            for old, new in zip(before.layers, after.layers, strict=True)
        ),
        merged=merged,
        parts=len(list((info.run_dir / PARTS_DIR).glob("*.json"))),
        # On /metrics a model has the name that it is served by, as in vLLM's own metrics.
        on_metrics=dataclasses.replace(read_source(info.base_url), model=merged.model),
    )


def _settled(run_dir: Path, *, more_than: int) -> ExpertLoad:
    """Return the counts once they have more steps than that and no longer change: they are written every 3 seconds.

    Unchanged at 25 looks in a row, not for a time: what keeps this process from looking keeps the server from writing.
    A write that waits for the disk is no such look. The time of the last step is not asked: steps without tokens, as
    vLLM makes after each request, are counted there and not written here.
    """
    deadline, last, unchanged = time.monotonic() + _SETTLE_S, None, 0
    while time.monotonic() < deadline:
        time.sleep(0.2)
        writes = [*run_dir.glob(f".{LOAD_FILE}.*.tmp"), *run_dir.glob(f"{PARTS_DIR}/.*.tmp")]
        try:
            load = read_run_load(run_dir)
        except InputError:
            load = None
        unchanged = unchanged + 1 if load == last and not writes else 0
        last = load
        if last is not None and last.steps > more_than and unchanged >= 25:
            return last
    raise AssertionError(f"no settled counts in {run_dir} after {_SETTLE_S:g} s: {last}")
