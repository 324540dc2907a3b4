"""What `serve --json` prints once the server is ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_optimizer.plan.plan import Plan
    from moe_optimizer.vllm_plugin.launch import ServerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenPass:
    """One row of the requested / applied / ran table."""

    pass_name: str
    requested: str
    applied: str
    ran: str
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyServer:
    """A server that is ready."""

    base_url: str
    model: str
    """The name to use in requests."""
    pid: int
    run_dir: str
    log: str
    plan_digest: str
    start_up_s: float
    passes: tuple[ProvenPass, ...]


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
        passes=tuple(
            ProvenPass(
                pass_name=row.pass_name,
                requested=row.requested,
                applied=row.applied,
                ran=row.ran,
                why_not=row.why_not,
            )
            for row in info.rows
        ),
    )
