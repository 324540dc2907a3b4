"""Lists the settings of `vllm serve` that a tuning tries for a plan, and their values."""

from __future__ import annotations

from collections.abc import Mapping

from moe_optimizer.plan.pass_params import SchedulerParams
from moe_optimizer.plan.plan import Plan

_REQUESTS = "--max-num-seqs"
_TOKENS = "--max-num-batched-tokens"
_CHUNKING = "--enable-chunked-prefill"
_GRAPHS = "--max-cudagraph-capture-size"
_CACHE = "--kv-cache-dtype"
_TENSOR = "--tensor-parallel-size"
_EXPERTS = "--enable-expert-parallel"
_BACKEND = "--moe-backend"
_GRAPH_CONFIGURATION = ("--compilation-config", "--cudagraph-capture-sizes")
_LAYOUT = ("--data-parallel-size", "--pipeline-parallel-size")

UNCHANGED = ""
"""The value that leaves a setting as the plan has it."""

Settings = Mapping[str, tuple[str, ...]]


def settings_of(plan: Plan, given: Mapping[str, str]) -> Settings:
    """Return each flag that is worth a try with its values, the unchanged one first.

    Whether a value is legal beside the others is the planner's to say: it makes the plan of each candidate.

    Args:
        plan: what the settings would change.
        given: the user's own arguments, which stay.
    """
    params = plan.decision("scheduler").params
    assert isinstance(params, SchedulerParams), "the scheduler knows what a step holds, on or off"
    found: dict[str, tuple[str, ...]] = {
        _REQUESTS: _around(params.max_num_seqs, least=8),
        _TOKENS: _around(params.max_num_batched_tokens, least=512),
        _CHUNKING: (UNCHANGED, "false"),
    }
    if plan.num_gpus:
        found[_CACHE] = (UNCHANGED, "auto", "fp8")
        # The sizes of a plan give way to the largest one.
        if "--enforce-eager" not in plan.serve_args and not any(flag in given for flag in _GRAPH_CONFIGURATION):
            found[_GRAPHS] = (UNCHANGED, "128", "256", "512", "1024")
        if not plan.plugin_decisions:
            found[_BACKEND] = (UNCHANGED, "triton", "flashinfer_cutlass", "deep_gemm")
    if plan.num_gpus > 1 and plan.group is None and not any(flag in given for flag in _LAYOUT):
        sizes = [str(2**power) for power in range(plan.num_gpus.bit_length()) if 2**power <= plan.num_gpus]
        found[_TENSOR] = (UNCHANGED, *sizes)
        found[_EXPERTS] = (UNCHANGED, "false")
    return {flag: values for flag, values in found.items() if flag not in given and len(values) > 1}


def _around(planned: int, *, least: int) -> tuple[str, ...]:
    """Return the planned number unchanged, and powers of two times it from a quarter to four times."""
    near = sorted({max(least, round(planned * factor)) for factor in (0.25, 0.5, 2, 4)} - {planned})
    return (UNCHANGED, *map(str, near))


def arguments_of(values: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments that a choice of values means."""
    return {flag: value for flag, value in values.items() if value != UNCHANGED}
