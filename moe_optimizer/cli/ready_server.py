"""Defines what `serve --json` prints once the server is ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moe_optimizer.launcher.stock_start import StockStart, last_stock_start
from moe_optimizer.proof.table import Row

if TYPE_CHECKING:
    from moe_optimizer.launcher.launch import ServerInfo
    from moe_optimizer.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServer:
    """A vLLM server of the run: the only one, or one behind the router."""

    name: str
    base_url: str
    pid: int
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyServer:
    """A server that is ready, or a group of servers behind a router."""

    base_url: str
    model: str
    """The model's name in requests."""
    pid: int
    run_dir: str
    log: str
    plan_digest: str
    start_up_s: float
    phases_s: Mapping[str, float]
    """Seconds of each phase of the start; those named "vLLM: ..." are parts of "vLLM answers"."""
    stock_start: StockStart | None
    """The last start of stock vLLM that `bench` or `tune` made here with this model and vLLM; null: none is known."""
    warm_up: Literal["whole", "short", "no"]
    """"short": only the shapes were sent for which an earlier start like this needed kernels, and some to prove it."""
    servers: tuple[VllmServer, ...]
    passes: tuple[Row, ...]
    restarts: int
    """Times it was started again after an unexpected end; the form is printed anew each time (--restart)."""


def ready_server(plan: Plan, info: ServerInfo) -> ReadyServer:
    """Return the published form of a server that is ready."""
    return ReadyServer(
        base_url=info.base_url,
        model=info.model,
        pid=info.pid,
        run_dir=str(info.run_dir),
        log=str(info.log_path),
        plan_digest=plan.digest,
        start_up_s=info.start_up_s,
        phases_s=info.phases_s,
        stock_start=last_stock_start(plan),
        warm_up=info.warm_up,
        servers=tuple(
            VllmServer(name=server.name, base_url=server.base_url, pid=server.pid, log=str(server.log_path))
            for server in info.servers
        ),
        passes=info.rows,
        restarts=info.restarts,
    )
