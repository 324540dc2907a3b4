"""Defines the Plan with its digest and its JSON form."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_optimizer.files import read_text
from moe_optimizer.plan.decision import Applier, Decision, Status
from moe_optimizer.plan.json_codec import decode_text, encode
from moe_optimizer.plan.layout_choice import LayoutChoice
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.plan.pass_params import ParallelismParams
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan.server_group import ServerGroup
from moe_optimizer.specs.hardware import HardwareSpec
from moe_optimizer.specs.model import ModelSpec
from moe_optimizer.specs.workload import WorkloadSpec

SCHEMA_VERSION = 2
PLAN_FILE = "plan.json"
"""The plan's file in a run folder."""
_MAX_FILE_BYTES = 64 << 20
"""Chosen: thousands of times a plan without placement tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that was decided for one server, with reasons. Equal inputs give an equal Plan."""

    model: ModelSpec
    hardware: HardwareSpec
    workload: WorkloadSpec
    profile_name: str
    profile: Mapping[str, Any]
    """The profile as resolved, JSON values, for the record."""
    engine: str
    """"vllm" or "embedded"."""
    vllm_version: str | None
    """The version planned for; None when no vLLM is installed."""
    num_gpus: int
    """GPUs used, of all machines together; 0 on the CPU build."""
    num_nodes: int
    """Machines, all like `hardware`."""
    decisions: tuple[Decision, ...]
    memory: MemoryPlan
    serve_args: ServeArguments
    """Arguments of `vllm serve` after the model: the planner's own, every decision's, then the user's."""
    plain_args: ServeArguments
    """What a user would give plain `vllm serve` for the same model, devices, port: the stock side of a comparison."""
    serve_env: Mapping[str, str]
    """Environment variables of the server processes (without those that carry the plan itself)."""
    group: ServerGroup | None
    """The servers that `serve_args` is the common part of; None: one server with exactly those arguments."""
    warnings: tuple[str, ...]
    layouts: LayoutChoice | None = None
    """How the layout was chosen, and what is predicted of it; None where nothing is."""
    schema_version: int = SCHEMA_VERSION

    def decision(self, pass_name: str) -> Decision:
        """Return the decision of one pass.

        Raises:
            KeyError: the plan has none by that name.
        """
        for decision in self.decisions:
            if decision.pass_name == pass_name:
                return decision
        raise KeyError(f"{pass_name}: not in the plan, which has {[d.pass_name for d in self.decisions]}")

    @property
    def parallelism(self) -> ParallelismParams:
        """How the devices of one server share the model."""
        return self.decision("parallelism").params_as(ParallelismParams)

    @property
    def plugin_decisions(self) -> tuple[Decision, ...]:
        """The decisions that the plugin carries out inside vLLM's processes."""
        return tuple(d for d in self.decisions if d.status is Status.ON and d.applier is Applier.PLUGIN)

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 over the canonical JSON form."""
        return hashlib.sha256(self.to_json(indent=None).encode()).hexdigest()[:16]

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the plan as JSON with sorted keys; `from_json` restores an equal Plan."""
        return json.dumps(encode(self), indent=indent, sort_keys=True, allow_nan=False)

    @staticmethod
    def from_json(text: str, *, origin: str) -> Plan:
        """Read a plan back.

        Raises:
            InputError: not JSON, another schema version, or an unknown, missing or ill-typed field;
                the message names `origin` and the field.
        """
        return decode_text(
            Plan,
            text,
            origin=origin,
            schema_version=SCHEMA_VERSION,
            hint="make the plan again with this version of moe-optimizer",
        )

    @staticmethod
    def load(path: Path) -> Plan:
        """Read the plan file at `path`.

        Raises:
            InputError: it cannot be read, or `from_json` refuses it.
        """
        return Plan.from_json(read_text(path, max_bytes=_MAX_FILE_BYTES), origin=str(path))

    def stock(self) -> Plan:
        """Return the plan of stock vLLM on the same devices: no argument and no variable of an optimization."""
        # How devices share the model is no optimization.
        tuned = {key for each in self.decisions if each.pass_name != "parallelism" for key in each.env}
        environment = {key: value for key, value in self.serve_env.items() if key not in tuned}
        group = self.group and self.group.with_common(self.plain_args, instead_of=self.serve_args)
        return self.replace(serve_args=self.plain_args, serve_env=environment, group=group)

    def replace(self, **changes: Any) -> Plan:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)
