"""Reads what profile and vLLM arguments say of CUDA graphs."""

from __future__ import annotations

import re

from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.pass_params import DualBatchOverlapParams
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.context import PlanContext

LARGEST_FLAG = "--max-cudagraph-capture-size"
SIZES_FLAG = "--cudagraph-capture-sizes"
_COMPILATION_FLAG = "--compilation-config"
"""Where its value cannot be read, it counts as empty: what vLLM cannot read either, it refuses by itself."""
_NO_GRAPHS = "deepep_high_throughput"
"""vLLM sets its mode to NONE with it and data parallelism (`set_splitting_ops_for_v1`, vLLM 0.26 and 0.32)."""


def is_eager(ctx: PlanContext) -> bool:
    """Return whether the profile asks for plain execution, and no flag for graphs."""
    return ctx.profile.passes.graph_capture.eager and not ctx.is_asked_by_flag("graph_capture")


def argument_against_graphs(given: ServeArguments) -> str:
    """Return the user's own argument with which vLLM captures nothing; "" where there is none."""
    if given.is_on("--enforce-eager"):
        return "--enforce-eager"
    if given.value("--optimization-level") == "0":
        return "-O0"
    if given.value(LARGEST_FLAG) == "0":
        return f"{LARGEST_FLAG} 0"
    mode = _mode(given)
    return f"cudagraph_mode {mode}" if mode.upper() == "NONE" else ""


def exchange_against_graphs(ctx: PlanContext) -> str:
    """Return the exchange of tokens between copies with which vLLM captures nothing; "" where there is none."""
    overlap = ctx.params(DualBatchOverlapParams)
    backend = overlap.all2all_backend if overlap else ctx.pinned.value("--all2all-backend")
    return _NO_GRAPHS if backend == _NO_GRAPHS and ctx.parallelism.data_parallel_size > 1 else ""


def largest_given(given: ServeArguments) -> tuple[str, int]:
    """Return the user's own argument that says what is captured, and the largest size by it; ("", 0): there is none."""
    flag, sizes = sizes_given(given)
    return flag, max(sizes, default=0)


def sizes_given(given: ServeArguments) -> tuple[str, tuple[int, ...]]:
    """Return the user's own argument that says what is captured, and the sizes in it, or the largest one alone."""
    config = given.json_object(_COMPILATION_FLAG) or {}
    for flag, text in (
        (SIZES_FLAG, given.value(SIZES_FLAG)),
        (LARGEST_FLAG, given.value(LARGEST_FLAG)),
        ("cudagraph_capture_sizes", config.get("cudagraph_capture_sizes")),
        ("max_cudagraph_capture_size", config.get("max_cudagraph_capture_size")),
    ):
        sizes = [int(number) for number in re.findall(r"\d{1,9}", str(text))]
        if any(sizes):
            return flag, tuple(sizes)
    return "", ()


def may_capture_prompts(ctx: PlanContext) -> bool:
    """Return whether device, profile and arguments allow graphs for steps that read prompts, before anything is
    decided. A plan inside a running vLLM comes after its flags.
    """
    section, mode = ctx.profile.passes.graph_capture, _mode(ctx.pinned)
    return (
        ctx.device != "cpu"
        and not ctx.request.inside_vllm
        and ctx.wish("graph_capture")[0] is not Wish.OFF
        and not argument_against_graphs(ctx.pinned)
        and not largest_given(ctx.pinned)[0]
        and (not mode or "PIECEWISE" in mode.upper())
        and not is_eager(ctx)
        and section.prompts != "off"
        and section.max_capture_size is None
    )


def prompts_have_graphs(ctx: PlanContext, step_tokens: int) -> bool:
    """Return whether steps of prompts up to so many tokens will have graphs: the plan's, or the user's own sizes."""
    own = largest_given(ctx.pinned)[1] >= step_tokens and not argument_against_graphs(ctx.pinned)
    return may_capture_prompts(ctx) or own


def _mode(given: ServeArguments) -> str:
    mode = (given.json_object(_COMPILATION_FLAG) or {}).get("cudagraph_mode")
    return "" if mode is None else str(mode)
