"""Makes the plan of a side, and describes the server that applied it for a record."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from moe_optimizer.inspection.hardware_probe import probe_hardware
from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.inspection.software import read_software
from moe_optimizer.inspection.vllm_installation import find_vllm
from moe_optimizer.launcher.launch import ServerInfo
from moe_optimizer.measure.bench.compilations import compilations
from moe_optimizer.plan.json_codec import encode
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.request import PlanRequest
from moe_optimizer.planner import make_plan
from moe_optimizer.profiles import load_profile
from moe_optimizer.specs.kernel_speeds import SpeedTables


def plan_here(model: str | Path, *vllm_args: str, kernel_speeds: SpeedTables | None = None, **request: Any) -> Plan:
    """Return the plan for a model on this machine.

    Args:
        model: a folder, or a name.
        vllm_args: arguments of `vllm serve`.
        kernel_speeds: measured tables; None: there are none, whatever lies on this machine.
        request: further fields of PlanRequest; the profile is the balanced one where none is given.
    """
    fields: dict[str, Any] = {"profile": load_profile("balanced")}
    software = read_software()
    return make_plan(
        PlanRequest(
            model=ModelInspector().inspect(model),
            hardware=probe_hardware(),
            # No tuned configuration: it would be a question of its own to the tables.
            software=dataclasses.replace(software, kernel_speeds=kernel_speeds or SpeedTables(), tuned_configs=None),
            vllm_args=ServeArguments(*vllm_args),
            **(fields | request),
        )
    )


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def compiled_by(info: ServerInfo) -> Callable[[], int]:
    """Return what counts how much a server compiled so far, as `bench` does."""
    return functools.partial(compilations, (info.run_dir,), os.environ)


def vllm_version() -> str | None:
    """Return the version of the installed vLLM."""
    vllm = find_vllm()
    return vllm.version if vllm else None


def served(plan: Plan, info: ServerInfo, passes: Collection[str]) -> dict[str, Any]:
    """Return what a record says of a plan and of the server, or the first of several, that ran by it."""
    proofs = info.proofs or info.servers[0].proofs
    return {
        "start_up_s": info.start_up_s,
        "plan_digest": plan.digest,
        "decisions": [encode(each) for each in plan.decisions if each.pass_name in passes],
        "serve_args": list(plan.serve_args.words),
        "versions": dict(proofs[0].versions) if proofs else {},
        "table": [list(dataclasses.astuple(row)) for row in info.rows if row.pass_name in passes],
    }
