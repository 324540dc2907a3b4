"""Splits the model over the GPUs of a machine by tensor, expert and data parallelism."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from moe_optimizer.costs.fp8_blocks import block_of_slice
from moe_optimizer.costs.weights import splits_over
from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.passes.parallelism.across_nodes import across_nodes, machines_of_copies
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import ParallelismParams
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.cpu_cores import BINDING, core_lists
from moe_optimizer.plan_context.expert_kernel import NOT_DATA_PARALLEL
from moe_optimizer.specs.quantity import number_of

_FEW_GPUS = 8
_ONE_DEVICE = ParallelismParams(tensor_parallel_size=1, data_parallel_size=1, expert_parallel=False)
_DIVIDES_BLOCKS = (0, 29)
"""The first vLLM that takes slices of FP8 experts which are no whole number of blocks."""
_RECORD = "benchmarks/records/2026-11-21_h200_layouts.json"
_EP_MEASURED = (
    "measured over 2 H200 in one run of vLLM 0.26 (Qwen3-30B-A3B with random weights, so nearly even routing): median "
    "time per output token 10 % longer than with slices for 1 client, 6 % longer for 16, 8 % shorter for 128; "
    "6 % longer than with a whole server on each GPU (--enable-replicas) for 1 client, 4 % shorter for 16, "
    "26 % shorter for 128"
)
_EP_PUBLISHED = (
    "published for DeepSeek over 8 H200: slower (vllm-project/vllm issue 28887), about 5 % more tokens/s "
    "(sgl-project/sglang pull request 3602)"
)


class Parallelism(OptimizationPass):
    """How many devices share the model, and how.

    Tensor parallel (TP): every layer is cut into slices, one for each device; all work on the same request.
    Expert parallel (EP): as TP, but each device holds whole experts instead of a slice of every expert.
    Data parallel (DP): copies of the attention part take different requests; the experts are shared.

    On GPUs the sizes are those of the layout that the search chose. Without one (on the CPU, inside a running vLLM,
    on a GPU of unknown rates) it takes the largest TP that the model's heads allow, EP only where a slice of an expert
    cannot be formed or it is asked for, DP only when asked for.
    """

    name = "parallelism"
    flag = "parallelism"
    title = "split the model over the GPUs (TP, EP, DP)"
    limits = "pipeline stages only across machines, slices only within one; what the layout brings is predicted"
    no_gain = "stock vLLM gets the same devices; the layouts are ranked among each other"
    setting_flags: ClassVar[Mapping[str, tuple[str, str]]] = {
        "expert-parallel": ("expert_parallel", "whole experts on each GPU instead of slices (EP)")
    }

    def why_not(self, ctx: PlanContext) -> str:
        """One device needs no split; more are supported where the model divides."""
        if ctx.request.num_nodes == _device_limit(ctx) == 1 and set(ctx.asked_sizes) <= {None, 1}:
            kind = "GPU" if ctx.device == "cuda" else "CPU process"
            return f"one {kind}: nothing to split"
        return ""

    def why_setting_off(self, decision: Decision, setting: str) -> str:
        """Expert parallelism is on or has been rejected."""
        assert setting == "expert_parallel", setting
        if decision.params_as(ParallelismParams).expert_parallel:
            return ""
        return decision.rejected.get("EP", decision.reason)

    def when_off(self, ctx: PlanContext, reason: str) -> Decision:
        """Return the decision for one device.

        Raises:
            InputError: several machines are planned for.
        """
        if ctx.request.num_nodes > 1:
            raise InputError(
                f"--nodes {ctx.request.num_nodes}: without parallelism, {reason}, one GPU of one machine serves",
                hint="give one of them",
            )
        warnings, limit = _ignored_wishes(ctx), _device_limit(ctx)
        if ctx.request.engine == "embedded" and ctx.asked_sizes[0]:
            # Its own arguments: it reads them after the plan.
            warnings = ()
        elif limit > 1:
            warnings += (f"{limit - 1} of {limit} GPUs stay unused: parallelism is {reason}",)
        return self.decision(ctx, Status.OFF, "TP=1", reason, Applier.NONE, params=_ONE_DEVICE, warnings=warnings)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the split over the devices of the context.

        Raises:
            UnsupportedError: a size that was asked for exceeds the devices or does not divide the model, or the
                user's own --enable-expert-parallel is known to crash.
        """
        asked, copies = ctx.asked_sizes
        if ctx.layout is not None:
            asked, copies = ctx.layout.tensor_parallel_size, ctx.layout.data_parallel_size
        data_parallel, limit = copies or 1, _device_limit(ctx) * machines_of_copies(ctx)
        _check_asked(ctx, asked or 1, data_parallel, limit)
        size = asked or max(1, limit // data_parallel)
        while size > 1 and not _splits(ctx, size, data_parallel)[0]:
            size -= 1
        expert_parallel, expert_reason, warnings = _expert_parallel(ctx, size, data_parallel)
        if ctx.layout is not None and ctx.layout.expert_parallel and not expert_parallel:
            expert_parallel, expert_reason = True, ""
        split = ParallelismParams(
            tensor_parallel_size=size, data_parallel_size=data_parallel, expert_parallel=expert_parallel
        )
        unused = limit - split.num_devices if ctx.device == "cuda" else 0
        rejected = _rejected(ctx, limit // data_parallel, size, data_parallel) if asked is None else {}
        if ctx.layout_choice is not None:
            rejected = {each.layout: each.why_not for each in ctx.layout_choice.estimates[1:]}
        if unused:
            why = f", because {'; '.join(rejected.values())}" if rejected else ""
            if ctx.layout_choice is not None:
                larger = [each.layout for each in ctx.layout_choice.estimates[1:] if each.num_gpus > split.num_devices]
                why = f": for {ctx.goal} {', '.join(larger)} would be worse" if larger else ""
            alone = "GPUs" if ctx.request.num_nodes == 1 else "GPUs of each machine"
            there = alone if ctx.num_servers == 1 else "GPUs of each server"
            warnings += (f"{unused} of {limit} {there} stay unused with {_sizes(split)}{why}",)
        if not expert_parallel:
            rejected["EP"] = expert_reason
        few_gpus_ep = expert_parallel and ctx.device == "cuda" and split.num_devices <= _FEW_GPUS
        if few_gpus_ep:
            warnings += (_ep_warning(split.num_devices),)
        across = across_nodes(ctx, split)
        arguments = _vllm_args(across.split)
        reasons = (_in_words(ctx, split), expert_reason if expert_parallel else "", across.reason, _by_search(ctx))
        return self.decision(
            ctx,
            Status.ON if arguments else Status.OFF,
            _value(ctx, across.split),
            "; ".join(filter(None, reasons)),
            Applier.FLAGS if arguments else Applier.NONE,
            evidence=(_RECORD,) if few_gpus_ep else (),
            rejected={**rejected, **across.rejected},
            vllm_args=arguments,
            env=_environment(ctx, split.num_devices) if arguments else {},
            params=across.split,
            warnings=(*warnings, *across.warnings),
        )


def _device_limit(ctx: PlanContext) -> int:
    """Return how many devices there are: GPUs, or on the CPU the cores, one process each at the least."""
    return ctx.num_gpus if ctx.device == "cuda" else 1


def _check_asked(ctx: PlanContext, size: int, data_parallel: int, limit: int) -> None:
    available = limit if ctx.device == "cuda" else ctx.cpu.cores
    unit = "GPUs" if ctx.device == "cuda" else "CPU cores"
    if size * data_parallel > available:
        servers = f", the share of each of {ctx.num_servers} servers" if ctx.num_servers > 1 else ""
        raise UnsupportedError(
            f"tensor parallel size {size} x data parallel size {data_parallel}: got {size * data_parallel} devices, "
            f"expected at most {available} {unit}{servers}"
        )
    splits, why = _splits(ctx, size, data_parallel)
    if not splits:
        raise UnsupportedError(f"tensor parallel size {size}: {ctx.model.name} does not split: {why}")


def _splits(ctx: PlanContext, size: int, data_parallel: int) -> tuple[bool, str]:
    """Return whether the model splits over `size` devices, with EP where a slice of an expert cannot be formed."""
    splits, why = _slices(ctx, size, data_parallel)
    if splits:
        return True, ""
    whole, whole_why = splits_over(ctx.model, size, expert_parallel=True)
    if not whole:
        return False, whole_why
    wish, origin = _expert_wish(ctx)
    if wish is Wish.OFF:
        return False, f"{why}, and whole experts on each GPU are switched off by {origin}"
    possible, no_experts = _experts_divide(ctx, size, data_parallel)
    return possible, f"{why}; {no_experts}"


def _slices(ctx: PlanContext, size: int, data_parallel: int) -> tuple[bool, str]:
    """Return whether every layer can be sliced `size` ways without EP, its experts over the devices of all copies."""
    model, slices = ctx.model, size * data_parallel
    splits, why = splits_over(model, size, expert_parallel=False, data_parallel_size=data_parallel)
    if not splits:
        return False, why
    block = model.weight_block if model.weights_are_fp8 and model.is_moe else None
    if slices == 1 or block is None or model.moe_intermediate_size // slices % block[0] == 0:
        return True, ""
    if _expert_wish(ctx)[0] is Wish.OFF and _divides_blocks(ctx, block, slices):
        return True, ""
    width = f"expert width {model.moe_intermediate_size} / {slices}"
    return False, f"{width} is not a whole number of FP8 blocks of {block[0]}"


def _divides_blocks(ctx: PlanContext, block: tuple[int, int], slices: int) -> bool:
    """Return whether vLLM makes the blocks of an FP8 checkpoint smaller until they divide a slice of an expert."""
    model, vllm = ctx.model, ctx.software.vllm
    if vllm is None or model.quant_method != "fp8":
        return False
    release = tuple(int(number) for number in re.findall(r"\d+", vllm.version)[:2])
    width = model.moe_intermediate_size // slices
    return release >= _DIVIDES_BLOCKS and block_of_slice(block, width, model.expert_hidden_size, slices) != block


def _experts_divide(ctx: PlanContext, size: int, data_parallel: int) -> tuple[bool, str]:
    """Return whether whole experts can be divided over all devices."""
    model, devices = ctx.model, size * data_parallel
    if not model.is_moe:
        return False, "the model has no experts"
    if devices == 1:
        return False, "one device holds all experts"
    if model.num_experts % devices:
        return False, f"{model.num_experts} experts do not divide by {devices}"
    if ctx.device == "cpu":
        if "fused_experts" not in ctx.software.kernels.cpu_ops:
            return False, "vLLM's own CPU expert kernel ignores the expert map, and ours is not built"
        if ctx.wish("flash_dmoe")[0] is Wish.OFF:
            return False, "vLLM's own CPU expert kernel ignores the expert map, and flash_dmoe is off"
        if data_parallel > 1:
            return False, f"vLLM's own CPU expert kernel ignores the expert map, and ours {NOT_DATA_PARALLEL}"
    return True, ""


def _expert_parallel(ctx: PlanContext, size: int, data_parallel: int) -> tuple[bool, str, tuple[str, ...]]:
    """Return whether EP is on, why or why not, and warnings."""
    wish, origin = _expert_wish(ctx)
    possible, why_not = _experts_divide(ctx, size, data_parallel)
    if not possible and wish is Wish.ON and "--enable-expert-parallel" in ctx.pinned:
        if ctx.device == "cpu":
            raise UnsupportedError(f"--enable-expert-parallel would end the server: {why_not}")
        return True, f"EP as given after --, although {why_not}", ()
    sliced, no_slices = _slices(ctx, size, data_parallel)
    if wish is Wish.OFF:
        return False, f"switched off by {origin}", ()
    if wish is Wish.ON:
        if possible:
            return True, f"EP asked for by {origin}", ()
        return False, why_not, (f"expert parallelism refused ({origin}): {why_not}",)
    if not possible:
        return False, why_not, ()
    if not sliced:
        return True, f"EP because {no_slices}", ()
    if data_parallel > 1:
        return True, "EP so that the data parallel copies share one set of experts", ()
    return False, "slices divide evenly, so every GPU has the same work whatever the routing", ()


def _expert_wish(ctx: PlanContext) -> tuple[Wish, str]:
    if "--enable-expert-parallel" in ctx.pinned:
        if not ctx.pinned.is_on("--enable-expert-parallel"):
            return Wish.OFF, "--no-enable-expert-parallel after --"
        return Wish.ON, "--enable-expert-parallel after --"
    return ctx.wish("parallelism.expert_parallel")


def _ep_warning(count: int) -> str:
    """Return what is known of EP over so many GPUs; what others published is for more than we measured."""
    known = (_EP_MEASURED, _EP_PUBLISHED) if count > 2 else (_EP_MEASURED,)
    return f"EP over {count} GPUs: {'; '.join(known)}; other models, routing and loads may differ"


def _ignored_wishes(ctx: PlanContext) -> tuple[str, ...]:
    wish, origin = _expert_wish(ctx)
    return (f"expert parallelism refused ({origin}): one device holds all experts",) if wish is Wish.ON else ()


def _rejected(ctx: PlanContext, most: int, size: int, data_parallel: int) -> dict[str, str]:
    """Return the largest size that was passed over because it does not divide the model, with its reason."""
    for larger in range(most, size, -1):
        splits, why = _splits(ctx, larger, data_parallel)
        if not splits:
            return {f"TP={larger}": why}
    return {}


def _in_words(ctx: PlanContext, split: ParallelismParams) -> str:
    unit, units = ("GPU", "GPUs") if ctx.device == "cuda" else ("process", "processes")
    size, copies, devices = split.tensor_parallel_size, split.data_parallel_size, split.num_devices
    if devices == 1:
        return f"one {unit} holds the whole model"
    words = []
    # Copies hold everything but routed experts, which the devices of all copies share.
    shared_experts = ctx.model.is_moe and (split.expert_parallel or copies > 1)
    if size > 1:
        what = "the attention part" if shared_experts else "every layer"
        words.append(f"{what} is cut into {size} slices, one per {unit}")
    if copies > 1:
        what = "attention part" if shared_experts else "model"
        words.append(f"{copies} copies of the {what} take different requests")
    if split.expert_parallel:
        most = -(-ctx.model.num_experts // devices)
        words.append(f"each of {devices} {units} holds {most} whole experts a layer")
    elif shared_experts:
        words.append(f"every expert is cut into {devices} slices, one per {unit}")
    return "; ".join(words)


def _sizes(split: ParallelismParams) -> str:
    data_parallel = f" DP={split.data_parallel_size}" if split.data_parallel_size > 1 else ""
    return f"TP={split.tensor_parallel_size}{data_parallel}"


def _by_search(ctx: PlanContext) -> str:
    """Return who chose the layout, and for what."""
    choice = ctx.layout_choice
    if choice is None:
        return ""
    if choice.pinned_by:
        return f"layout {choice.chosen}, as {choice.pinned_by} asks"
    why = f"the best of {choice.num_layouts} for {choice.goal}"
    return f"layout {choice.chosen}, {why}, as predicted with {number_of(choice.clients, 'client')}"


def _value(ctx: PlanContext, split: ParallelismParams) -> str:
    parts = [_sizes(split)]
    if split.expert_parallel:
        parts.append(f"EP={split.num_devices}")
    if split.pipeline_parallel_size > 1:
        parts.append(f"PP={split.pipeline_parallel_size}")
    return " ".join(parts) + _where(ctx, split)


def _where(ctx: PlanContext, split: ParallelismParams) -> str:
    """Return on which machines the servers are; "" on one and for one pipeline over all."""
    if split.machines_of_copies > 1:
        each = f"each of {split.replicas} servers " if split.replicas > 1 else ""
        return f", {each}over {split.machines_of_copies} machines"
    each = f"{ctx.num_servers} servers " if ctx.num_servers > 1 else ""
    return f", {each}on each of {ctx.request.num_nodes} machines" if split.replicas > 1 else ""


def _vllm_args(split: ParallelismParams) -> ServeArguments:
    arguments: list[str] = []
    if split.tensor_parallel_size > 1:
        arguments += ["--tensor-parallel-size", str(split.tensor_parallel_size)]
    if split.data_parallel_size > 1:
        arguments += ["--data-parallel-size", str(split.data_parallel_size)]
    if split.machines_of_copies > 1:
        # The commands of each machine add where the first one is, and which copies are its own.
        arguments += ["--data-parallel-size-local", str(split.data_parallel_size // split.machines_of_copies)]
    if split.expert_parallel:
        arguments += ["--enable-expert-parallel"]
    if split.pipeline_parallel_size > 1:
        # vLLM reaches the other machines through Ray.
        size = str(split.pipeline_parallel_size)
        arguments += ["--pipeline-parallel-size", size, "--distributed-executor-backend", "ray"]
    return ServeArguments(*arguments)


def _environment(ctx: PlanContext, processes: int) -> dict[str, str]:
    """Return the cores of the CPU workers."""
    return {} if ctx.device == "cuda" else {BINDING: "|".join(core_lists(ctx.cpu.core_ids, processes))}
