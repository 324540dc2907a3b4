"""Names the servers that bench_layouts.py compares, and plans each."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_optimizer.specs.layout import parse_layout

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "moe_optimizer")
MEMORY = 0.9
"""Of each GPU, for all servers that run on it at once."""
CACHE = 0.85
"""Of the cache that the plan expects: what the plan does not know of must fit too."""
PORTS = 10
"""From one layout's first port to the next one's: its servers, and the router's two."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A layout, and how it is served."""

    layout: str
    share: float
    """Of the memory of each GPU."""
    port: int
    own_args: tuple[str, ...] = ()
    """vllm serve arguments that the others do not get."""

    @property
    def name(self) -> str:
        """Return what the record calls it."""
        return " ".join((self.layout, *self.own_args))

    @property
    def slug(self) -> str:
        """Return its name for a file."""
        return re.sub(r"[^\w.]+", "-", self.name)


def groups(layouts: str, port: int) -> list[list[Entry]]:
    """Return the layouts of --layouts that are served at once, in order."""
    ports = itertools.count(port, PORTS)
    found = []
    for names in layouts.split(","):
        entries = names.split("+")
        found.append([_entry(words.split(), MEMORY / len(entries), next(ports)) for words in entries])
    return found


def _entry(words: Sequence[str], share: float, port: int) -> Entry:
    layout, _, asked = words[0].partition(":")
    return Entry(layout, float(asked or share), port, tuple(words[1:]))


def write_plan(entry: Entry, options: Any, vllm_args: list[str], folder: Path) -> Path:
    """Plan a layout, and return the file of its plan."""
    words = ["plan", options.model, *_planned(entry, options), "--json", *vllm_arguments(entry, vllm_args)]
    plan = asked(words)
    # vLLM sizes its cache by what is free while it starts, and others start beside it.
    cache = int(plan["memory"]["kv_cache_bytes"] * CACHE)
    path = folder / f"{entry.slug}.json"
    path.write_text(json.dumps(asked([*words, "--kv-cache-memory-bytes", str(cache)])), encoding="utf-8")
    return path


def vllm_arguments(entry: Entry, vllm_args: list[str]) -> list[str]:
    """Return what is given to vLLM, after --."""
    return [*(vllm_args or ["--"]), *entry.own_args, "--gpu-memory-utilization", f"{entry.share:.2f}"]


def foresee(entry: Entry, options: Any, vllm_args: list[str]) -> None:
    """Print what would run, and what is predicted of it."""
    lengths = ("--input-tokens", str(options.input_tokens), "--output-tokens", str(options.output_tokens))
    words = ["plan", options.model, *_planned(entry, options), *lengths, "--hardware", options.dry_run, "--json"]
    print(entry.name)
    for number, clients in enumerate(options.clients.split(",")):
        plan = asked([*words, "--clients", clients, *vllm_arguments(entry, vllm_args)])
        if not number:
            servers = plan["group"]["servers"] if plan["group"] else [plan]
            print(*(f"  vllm serve {' '.join(server['serve_args'])}" for server in servers), sep="\n")
        if plan["layouts"] is None:
            print("  does not fit")
            return
        found = plan["layouts"]["estimates"][0]
        print(f"  {clients:>5} clients: TPOT {found['tpot_ms']} ms, {found['tokens_per_s']} tokens/s")


def asked(words: list[str]) -> Any:
    """Return what the command prints as JSON.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run([*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def _planned(entry: Entry, options: Any) -> list[str]:
    """Return the words that say what is planned."""
    return [
        *("--profile", options.profile, "--layout", entry.layout),
        *("--gpus", str(parse_layout(entry.layout).num_devices)),
        *("--batch-size", str(most_clients(options)), "--port", str(entry.port)),
    ]


def most_clients(options: Any) -> int:
    """Return the most clients that are asked for; each engine takes as many at once."""
    return max(int(count) for count in options.clients.split(","))
