"""Decides whether prefill and decode get servers of their own, and plans these."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from moe_optimizer.costs.memory import GIB
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import DisaggregationParams, KvCacheParams
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan.server_group import LOCAL, RUN_DIR, SIDE_CHANNEL_HOST, ServerGroup, ServerRole
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.routed_servers import (
    UNSAFE_FLAGS_APART,
    plan_port,
    router_args,
    servers_behind_router,
    undividable_cpu,
    unsafe_flag,
)
from moe_optimizer.specs.quantity import number_of

_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""What vLLM calls the part of a server."""
_SIDE_CHANNEL_OFFSET = 100
"""Chosen: from the plan's port to NIXL's own; each server takes one for each of its processes."""
_NIXL = "NixlConnector"
_SHARED_FOLDER = "SharedFolderConnector"
_NOT_RUN = "prefill and decode over several machines are planned, and were not run: try them before they are relied on"
_MODULES = {
    _NIXL: "moe_optimizer.vllm_plugin.kv_connectors.prompt_checked_nixl",
    _SHARED_FOLDER: "moe_optimizer.vllm_plugin.kv_connectors.shared_folder_connector",
}
"""Where vLLM finds the connectors: both are subclasses of its own."""


class Disaggregation(OptimizationPass):
    """Some servers only read prompts, the others only write answers, with a router before them.

    Long prompts then no longer hold up running answers. The pass stands first, because all others plan one of the
    servers, which have equal shares of the devices.
    """

    name = "disaggregation"
    flag = "disaggregation"
    title = "separate servers for prefill and decode"
    limits = (
        "tunes latency, not throughput: each server holds the whole model on its share of the devices, and every "
        "prompt's cache travels between them; requests are dealt in turns, so prompts with a common beginning may meet "
        "different caches; over several machines planned, not run"
    )
    no_gain = "how often a long prompt holds up answers depends on the traffic, and the model is of one step"

    def why_not(self, ctx: PlanContext) -> str:
        """Needs devices for all servers, and arguments that they can have."""
        servers, machines = sum(_counts(ctx)), ctx.request.num_nodes
        if ctx.device == "cuda" and ctx.num_gpus * machines < servers:
            return f"needs at least {servers} GPUs, one for each server, found {ctx.num_gpus * machines}"
        if servers < machines:
            return f"needs at least one server on each of {machines} machines, and {servers} are asked for"
        why_not = unsafe_flag(ctx, UNSAFE_FLAGS_APART)
        if ctx.device == "cpu":
            why_not = why_not or undividable_cpu(ctx, servers)
            if not why_not and ctx.model.state_bytes_per_sequence:
                why_not = "the model keeps a state beside its cache, which does not travel over a shared folder"
        return why_not

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the servers where they are asked for by name, or are of the chosen layout; nothing measured says when
        they pay.
        """
        chosen = ctx.layout is not None and ctx.layout.disaggregated
        if ctx.wish(self.name)[0] is Wish.AUTO and not chosen:
            return self.when_off(ctx, "it trades throughput for steadier latency; --enable-disaggregation asks for it")
        prefill, decode = _counts(ctx)
        machines, there = ctx.request.num_nodes, ctx.num_gpus * ctx.request.num_nodes
        each = ctx.num_gpus // -(-(prefill + decode) // machines)
        idle = there - each * (prefill + decode)
        share = f"a share of {number_of(each, 'GPU')}" if ctx.device == "cuda" else "its share of the cores"
        connector = _NIXL if ctx.device == "cuda" else _SHARED_FOLDER
        return self.decision(
            ctx,
            Status.ON,
            f"{prefill} prefill + {decode} decode, {connector}" + (f", {machines} machines" if machines > 1 else ""),
            f"{number_of(prefill, 'server')} for prompts and {decode} for answers, each with {share}, so that a long "
            f"prompt does not hold up running answers{_on_machines(prefill, decode, machines)}",
            Applier.SERVERS,
            rejected={"auto": "no record says for which load it pays"},
            params=DisaggregationParams(prefill_servers=prefill, decode_servers=decode, connector=connector),
            warnings=(
                *((f"disaggregation leaves {idle} of {there} GPUs idle",) if idle else ()),
                *((_NOT_RUN,) if machines > 1 else ()),
            ),
        )

    def server_group(self, ctx: PlanContext, serve_args: ServeArguments) -> ServerGroup:
        """Return the servers and the router, which takes the plan's address; the servers have the ports after it.

        Over several machines each of these has its servers on the same ports, and the router is on the first.

        Raises:
            InputError: there are no such ports.
        """
        params = ctx.decided[self.name].params_as(DisaggregationParams)
        names = [f"prefill-{index}" for index in range(params.prefill_servers)]
        names += [f"decode-{index}" for index in range(params.decode_servers)]
        machines = _machines_of(params.prefill_servers, params.decode_servers, ctx.request.num_nodes)
        most = max(map(machines.count, machines))
        needed = most + 1
        if ctx.device == "cuda":
            needed = most * _SIDE_CHANNEL_OFFSET + ctx.parallelism.num_devices
        port = plan_port(serve_args, ports_after=needed, asked_by=self.name)
        servers = servers_behind_router(ctx, serve_args, port, dict(zip(names, machines, strict=True)))
        parts = [word for server in servers for word in (f"--{_part(server)}", server.url)]
        roles = tuple(self._role(ctx, server, port) for server in servers)
        # In turns, of each part for itself: the default policy keeps a tree of all prompts.
        common = router_args(serve_args, port, machines.count(0))
        return ServerGroup(servers=roles, router_args=ServeArguments("--vllm-pd-disaggregation", *parts) + common)

    def _role(self, ctx: PlanContext, server: ServerRole, router_port: int) -> ServerRole:
        """Return the server with its end of the connector."""
        connector = ctx.decided[self.name].params_as(DisaggregationParams).connector
        transfer: dict[str, Any] = {
            "kv_connector": connector,
            "kv_role": _ROLES[_part(server)],
            "kv_connector_module_path": _MODULES[connector],
        }
        host, own_port = server.serve_args.value("--host") or LOCAL, server.serve_args.count("--port") or router_port
        side_channel = router_port + (own_port - router_port) * _SIDE_CHANNEL_OFFSET
        # The decode servers ask there for the memory that a cache lies in, so it must be reached from their machines.
        environment = {SIDE_CHANNEL_HOST: host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)}
        if ctx.device == "cpu":
            environment = server.serve_env
            transfer["kv_connector_extra_config"] = {"shared_storage_path": f"{RUN_DIR}/kv"}
        offload_gib = ctx.decided["kv_cache"].params_as(KvCacheParams).offload_gib
        if offload_gib is not None:
            transfer = _beside_tier(transfer, offload_gib)
        own = ServeArguments("--kv-transfer-config", json.dumps(transfer, separators=(",", ":")))
        return dataclasses.replace(server, serve_args=server.serve_args + own, serve_env=environment)


def _counts(ctx: PlanContext) -> tuple[int, int]:
    """Return how many servers read prompts and how many write answers."""
    if ctx.layout is not None and ctx.layout.disaggregated:
        return ctx.layout.prefill_servers, ctx.layout.replicas
    asked = ctx.profile.passes.disaggregation
    prefill = asked.prefill_servers or 1
    return prefill, asked.decode_servers or max(1, ctx.request.num_nodes - prefill)


def _machines_of(prefill: int, decode: int, machines: int) -> list[int]:
    """Return the machine of each server, those for prompts first: all machines have as many of each kind where both
    divide by their number. Else the servers fill them in order, so that few machines have both kinds.
    """
    alike = prefill % machines == decode % machines == 0
    kinds = (prefill, decode) if alike else (prefill + decode,)
    return [index * machines // count for count in kinds for index in range(count)]


def _on_machines(prefill: int, decode: int, machines: int) -> str:
    """Return where the servers lie; "" on one machine."""
    if machines == 1:
        return ""
    if prefill % machines == decode % machines == 0:
        return f"; on each of {machines} machines {prefill // machines} and {decode // machines}"
    return f"; they lie on {machines} machines in this order"


def _part(server: ServerRole) -> str:
    """Return "prefill" or "decode"."""
    return server.name.partition("-")[0]


def _beside_tier(transfer: dict[str, Any], offload_gib: int) -> dict[str, Any]:
    """Return a server's connector and the one to its host's memory as one.

    Both store every block. The first that has a prompt's blocks loads them: those that travel go before the tier's, as
    the prefill server keeps them until they are fetched.
    """
    tier = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": offload_gib * GIB},
    }
    # The prefill server too takes blocks in, from its tier. Without the role of a consumer vLLM's scheduler would give
    # a block away while a step in flight may still write it.
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [transfer, tier]},
    }
