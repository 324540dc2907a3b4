"""Defines several servers that answer as one, behind a router."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from moe_optimizer.plan.serve_args import ServeArguments

RUN_DIR = "RUN_DIR"
"""Stands for the run's folder in arguments: a plan does not know yet where it will run."""
LOCAL = "127.0.0.1"
"""Where the servers of one machine listen: only the router is for others."""

SIDE_CHANNEL_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
"""vLLM's variable: the address at which other servers ask a server for its caches."""


def machine_address(machine: int) -> str:
    """Return what stands for the address of one of several machines: a plan does not know which ones they will be."""
    return f"ADDRESS_{machine}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRole:
    """One server of a group."""

    name: str
    """Such as "prefill" or "replica-0"; also its folder below the run folder."""
    serve_args: ServeArguments
    """All arguments of its `vllm serve` after the model."""
    serve_env: Mapping[str, str]
    """Environment variables on top of the plan's."""
    gpus: tuple[int, ...]
    """Which of the GPUs of its machine that the launcher sees are its own; () on the CPU."""
    machine: int = 0
    """Which of the plan's machines it lies on, counted from 0; the router is on that one."""

    @property
    def url(self) -> str:
        """Where the router finds it."""
        return f"http://{self.serve_args.value('--host')}:{self.serve_args.value('--port')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerGroup:
    """Servers that share the work, and the router that listens on the plan's address."""

    servers: tuple[ServerRole, ...]
    """Those of disaggregation in the order in which a request passes through them."""
    router_args: ServeArguments
    """All arguments of `vllm-router`."""

    def with_common(self, common: ServeArguments, *, instead_of: ServeArguments) -> ServerGroup:
        """Return the group with other arguments that its servers have in common; what a server has alone stays."""
        roles = []
        for role in self.servers:
            own = [each for each in role.serve_args.arguments if each not in instead_of.arguments]
            words = ServeArguments(*(word for each in own for word in each.words))
            roles.append(dataclasses.replace(role, serve_args=common.overridden_by(words)))
        return dataclasses.replace(self, servers=tuple(roles))
