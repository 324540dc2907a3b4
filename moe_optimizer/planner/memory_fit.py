"""Plans the memory under all decisions, and refuses a plan that does not fit."""

from __future__ import annotations

import dataclasses
import math

from moe_optimizer.costs.memory import GIB
from moe_optimizer.errors import DoesNotFitError
from moe_optimizer.inspection.hardware_catalog import hardware_names
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.plan.pass_params import DisaggregationParams, Fp8Params
from moe_optimizer.plan_context.allowed_layouts import least_gpus
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.four_bits import why_not_in_four_bits
from moe_optimizer.specs.expert_formats import MXFP4_BITS
from moe_optimizer.specs.quantity import bytes_in_words


def memory_under_decisions(context: PlanContext) -> MemoryPlan:
    """Return the memory of the fullest device under all decisions."""
    cache = context.kv_cache
    shortest = context.workload.input_tokens + context.workload.output_tokens
    terms = context.memory_terms(cache.kv_bits)
    memory = context.memory(**terms, max_model_len=min(shortest, cache.wanted_model_len or shortest))
    if context.device == "cuda":
        return memory
    assert cache.host_cache_gib is not None, f"planning for {context.device}"
    size = cache.host_cache_gib * GIB
    if size > memory.kv_cache_bytes:
        # The CPU build takes whole GiB of cache, so less than one is none.
        return dataclasses.replace(memory, fits=False)
    unneeded = memory.kv_cache_bytes - size
    lost_tokens = math.ceil(unneeded / memory.kv_bytes_per_token) if memory.kv_bytes_per_token else 0
    return dataclasses.replace(memory, kv_cache_bytes=size, kv_tokens=max(0, memory.kv_tokens - lost_tokens))


def layers_left_do_not_fit(context: PlanContext, memory: MemoryPlan) -> tuple[str, ...]:
    """Return a warning where the layers that FP8 may leave unconverted, found while loading, could need more memory
    than the plan leaves unused; () where even all of them fit.
    """
    fp8 = context.params(Fp8Params)
    if fp8 is None or fp8.max_layer_error is None:
        return ()
    terms = context.memory_terms(context.kv_cache.kv_bits)
    more = context.memory(**terms, expert_bits=None).weight_bytes - memory.weight_bytes
    if more <= memory.unused_bytes:
        return ()
    return (
        f"fp8: layers that it changes by more than {fp8.max_layer_error:g} stay {context.dtype}, found while "
        f"loading; all of them would take {bytes_in_words(more)} more than planned, and "
        f"{bytes_in_words(memory.unused_bytes)} are unused: "
        "measure them before (fp8.sensitivity), or keep none (max_layer_error: null)",
    )


def require_fit(asked: PlanContext, context: PlanContext, memory: MemoryPlan) -> None:
    """Raise DoesNotFitError, with how many devices would do, unless `memory` fits; `asked` is without decisions."""
    if memory.fits:
        return
    sizes = (
        memory.weight_bytes,
        memory.activation_bytes + memory.workspace_bytes,
        memory.budget_bytes,
        memory.total_bytes,
    )
    weights, work, budget, total = map(bytes_in_words, sizes)
    message = (
        f"{context.model.name} does not fit {_where(context)}: each needs {weights} of weights and {work} to work in, "
        f"and may use {budget} of {total}"
    )
    raise DoesNotFitError(message, hint=_fit_hint(asked, context, memory))


def _where(context: PlanContext) -> str:
    if context.device == "cpu":
        return "this machine"
    machines = f"{context.request.num_nodes} machines of " if context.request.num_nodes > 1 else ""
    split = context.parallelism
    return f"{machines}{split.num_devices // split.machines_of_copies} x {context.gpu.name}"


def _fit_hint(asked: PlanContext, context: PlanContext, memory: MemoryPlan) -> str:
    if context.device == "cpu" and context.request.hardware.origin == "probed":
        names = ", ".join(hardware_names())
        return f"this is the plan for the CPU here; for another machine: --dry-run --hardware with one of {names}"
    if context.device == "cpu":
        return "use a smaller model or a machine with more memory"
    if memory.activation_bytes + memory.workspace_bytes > memory.budget_bytes:
        step = context.scheduler
        return (
            f"a step takes that on every GPU: lower --batch-size {step.max_num_seqs} "
            f"or -- --max-num-batched-tokens {step.max_num_batched_tokens}"
        )
    planned, stored = least_gpus(asked), least_gpus(asked, expert_bits=None, linear_bits=None)
    converts = context.decided["fp8"].status is Status.ON
    by_flag = "" if converts or context.model.quant_method is not None else " (--enable-fp8)"
    needs = {
        f"as stored ({context.model.quant_method or context.dtype})": stored,
        "in BF16": least_gpus(asked, expert_bits=16, linear_bits=16),
        f"in FP8{by_flag}": least_gpus(asked, expert_bits=8, linear_bits=8),
    }
    needs |= _in_four_bits(asked, context, fp8=needs[f"in FP8{by_flag}"])
    if planned != stored:
        needs = {"as planned": planned} | needs
    words = ", ".join(f"{'no number up to 64' if each is None else each[0]} {how}" for how, each in needs.items())
    each_server = " for each server" if context.num_servers > 1 else ""
    advice = "" if planned is None else _advice(context, *planned)
    return f"GPUs of this kind needed{each_server}: {words}{advice}"


def _in_four_bits(
    asked: PlanContext, context: PlanContext, *, fp8: tuple[int, int] | None
) -> dict[str, tuple[int, int]]:
    """Return how many GPUs hold the experts in four bits, where those can be converted and need fewer than in FP8.

    Four bits change the answers, so they are named only where they save GPUs.
    """
    if context.decided["four_bit"].status is Status.ON or why_not_in_four_bits(context):
        return {}
    _, linear_bits = context.converted_bits()
    least = least_gpus(asked, expert_bits=MXFP4_BITS, linear_bits=linear_bits)
    return {} if least is None or (fp8 is not None and least >= fp8) else {"in four bits (--enable-four-bit)": least}


def _advice(context: PlanContext, needed: int, machines: int) -> str:
    """Return how to get at the GPUs that would do, where more are there than the plan uses.

    Args:
        context: with all decisions.
        needed: GPUs for one server.
        machines: on how many machines they are.
    """
    asked, there = context.profile.passes.parallelism, context.hardware.num_gpus
    wanted = needed * context.num_servers
    if machines > 1 and context.params(DisaggregationParams) is not None:
        return "; a server for prefill or decode lies within one machine: --disable-disaggregation has one over several"
    if context.request.num_nodes > 1 or needed <= context.parallelism.num_devices:
        return ""
    if wanted > there:
        # One server is planned over several machines, and of whole ones.
        whole = machines > 1 and there == context.gpu.max_gpus_per_node and wanted == needed
        return f"; over several machines: moe-optimizer plan --nodes {machines}" if whole else ""
    if asked.max_gpus is not None and asked.max_gpus < wanted:
        return f"; {there} are there, and {context.profile_origin} uses at most {asked.max_gpus}: take another profile"
    if "--tensor-parallel-size" in context.pinned or asked.tensor_parallel_size is not None:
        return f"; {there} are there: ask for a tensor parallel size of {needed // (context.asked_sizes[1] or 1)}"
    return f"; {there} are there: use --gpus {wanted}"
