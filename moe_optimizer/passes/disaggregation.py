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
from moe_optimizer.plan.server_group import RUN_DIR, ServerGroup, ServerRole
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.routed_servers import (
    LOCAL,
    UNSAFE_FLAGS_APART,
    local_servers,
    plan_port,
    router_args,
    server_url,
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
        "different caches; on one machine"
    )
    no_gain = "how often a long prompt holds up answers depends on the traffic, and the model is of one step"

    def why_not(self, ctx: PlanContext) -> str:
        """Needs devices for all servers, and arguments that they can have."""
        servers = sum(_counts(ctx))
        if ctx.device == "cuda" and ctx.num_gpus < servers:
            return f"needs at least {servers} GPUs, one for each server, found {ctx.num_gpus}"
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
        each, idle = divmod(ctx.num_gpus, prefill + decode)
        share = number_of(each, "GPU") if ctx.device == "cuda" else "its share of the cores"
        connector = _NIXL if ctx.device == "cuda" else _SHARED_FOLDER
        return self.decision(
            ctx,
            Status.ON,
            f"{prefill} prefill + {decode} decode, {connector}",
            f"{number_of(prefill, 'server')} for prompts and {decode} for answers, each on {share}, so that a long "
            "prompt does not hold up running answers",
            Applier.SERVERS,
            rejected={"auto": "no record says for which load it pays"},
            params=DisaggregationParams(prefill_servers=prefill, decode_servers=decode, connector=connector),
            warnings=(f"disaggregation leaves {idle} of {ctx.num_gpus} GPUs idle",) if idle else (),
        )

    def server_group(self, ctx: PlanContext, serve_args: ServeArguments) -> ServerGroup:
        """Return the servers and the router, which takes the plan's address; the servers have the ports after it.

        Raises:
            InputError: there are no such ports.
        """
        params = ctx.decided[self.name].params_as(DisaggregationParams)
        names = [f"prefill-{index}" for index in range(params.prefill_servers)]
        names += [f"decode-{index}" for index in range(params.decode_servers)]
        needed = len(names) + 1
        if ctx.device == "cuda":
            needed = len(names) * _SIDE_CHANNEL_OFFSET + ctx.parallelism.num_devices
        port = plan_port(serve_args, ports_after=needed, asked_by=self.name)
        servers = local_servers(ctx, serve_args, port, names)
        parts = [word for server in servers for word in (f"--{_part(server)}", server_url(server))]
        roles = tuple(
            self._role(ctx, server, port + count * _SIDE_CHANNEL_OFFSET) for count, server in enumerate(servers, 1)
        )
        # In turns, of each part for itself: the default policy keeps a tree of all prompts.
        common = router_args(serve_args, port, len(servers))
        return ServerGroup(servers=roles, router_args=ServeArguments("--vllm-pd-disaggregation", *parts) + common)

    def _role(self, ctx: PlanContext, server: ServerRole, side_channel: int) -> ServerRole:
        """Return the server with its end of the connector."""
        connector = ctx.decided[self.name].params_as(DisaggregationParams).connector
        transfer: dict[str, Any] = {
            "kv_connector": connector,
            "kv_role": _ROLES[_part(server)],
            "kv_connector_module_path": _MODULES[connector],
        }
        environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": LOCAL, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)}
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
    return asked.prefill_servers or 1, asked.decode_servers or 1


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
