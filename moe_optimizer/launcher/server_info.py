"""Describes a run that is ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moe_optimizer.proof.record import Proof
from moe_optimizer.proof.table import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """One vLLM server of a run."""

    name: str
    """"server", or "prefill server" and "decode server" in a group."""
    base_url: str
    pid: int
    """Its API server."""
    log_path: Path
    proofs: tuple[Proof, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A run that is ready: its server, or the router of a group, and its proofs."""

    base_url: str
    pid: int
    """The process that listens at `base_url`."""
    model: str
    """The name to use in requests."""
    run_dir: Path
    log_path: Path
    servers: tuple[RunningServer, ...]
    """The only server, or the servers behind the router."""
    rows: tuple[Row, ...]
    """requested / applied / ran / why not, one row for each pass, over all servers."""
    proofs: tuple[Proof, ...]
    """Of all servers."""
    start_up_s: float
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of the start; those named "vLLM: ..." are parts of "vLLM answers"."""
    warm_up: Literal["whole", "short", "no"] = "no"
    """"whole"; "short" where an earlier start like this has left its kernels; "no"."""
    restarts: int = 0
    """Times it was started again after an unexpected end."""
