"""Collects the warnings of a plan."""

from __future__ import annotations

from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.request import PlanRequest
from moe_optimizer.planner.first_context import asked_lengths
from moe_optimizer.planner.memory_fit import layers_left_do_not_fit
from moe_optimizer.specs.quantity import bytes_in_words

_UNCOUNTED = (
    "--cpu-offload-gb",
    "--decode-context-parallel-size",
    "--enable-lora",
    "--hf-overrides",
    "--kv-cache-memory-bytes",
    "--num-gpu-blocks-override",
    "--speculative-config",
)
"""Arguments of the user's that change what the memory is needed for, and that the memory plan knows nothing of."""


def plan_warnings(request: PlanRequest, context: PlanContext, memory: MemoryPlan) -> tuple[str, ...]:
    """Return what the user should know of the whole plan, each once; the passes' own warnings come last."""
    warnings = [*request.hardware.warnings, *request.model.warnings]
    if request.hardware.gpu is not None and context.device == "cpu":
        warnings.append("this machine has a GPU, but the installed vLLM is the CPU build; planning for the CPU")
    vllm = request.software.vllm
    if vllm is None and request.engine == "vllm":
        warnings.append("no vLLM is installed: the plan cannot be started here")
    elif vllm is not None and context.device == "cuda" and vllm.device == "cpu":
        warnings.append(f"the installed vLLM {vllm.version} is the CPU build: this plan cannot be started here")
    elif vllm is not None and (untried := request.software.vllm_runs.why_untried(vllm.version, vllm.device)):
        warnings.append(untried)
    gptq = request.model.int4 if request.model.quant_method == "gptq" else None
    if gptq and gptq.zero_points and "--quantization" not in context.pinned:
        warnings.append(
            "the checkpoint is GPTQ with zero points (sym: false): vLLM 0.26 and 0.32 end the start with 'Unsupported "
            "quantization config'; -- --quantization moe_wna16 is their other method, which was not run"
        )
    if request.model.is_moe:
        warnings += request.software.kernel_speeds.warnings
    else:
        warnings.append("the model has no experts: only the passes that do not need any can help")
    warnings += _unused_machines(request, context)
    most, length = request.model.max_model_len, context.workload.max_model_len
    if length is not None and 0 < most < length:
        warnings.append(f"--max-model-len {length}: the model was made for {most} tokens, beyond them it may fail")
    asked, planned = asked_lengths(request), (context.workload.input_tokens, context.workload.output_tokens)
    if planned != asked:
        warnings.append(
            f"max-model-len {length} is less than prompts of {asked[0]} and answers of {asked[1]} tokens: "
            f"predictions take {planned[0]} and {planned[1]}"
        )
    uncounted = [flag for flag in _UNCOUNTED if context.pinned.is_on(flag)]
    if uncounted:
        warnings.append(f"the memory plan does not count what is given after --: {', '.join(uncounted)}")
    placement = context.decided["expert_placement"]
    if request.expert_load is not None and placement.status is not Status.ON:
        path = request.expert_load.placed_by.path
        warnings.append(f"experts are not placed by the load given ({path}): {placement.reason}")
    cache = context.kv_cache
    if cache.max_model_len is not None and cache.max_model_len < (cache.wanted_model_len or 0):
        warnings.append(
            f"max-model-len is {cache.max_model_len} instead of {cache.wanted_model_len}: "
            f"the cache has {bytes_in_words(memory.kv_cache_bytes)}"
        )
    warnings += layers_left_do_not_fit(context, memory)
    warnings += [warning for decision in context.decided.values() for warning in decision.warnings]
    return tuple(dict.fromkeys(warnings))


def _unused_machines(request: PlanRequest, context: PlanContext) -> list[str]:
    idle, there = request.num_nodes - context.request.num_nodes, request.num_nodes
    stay = "stays" if idle == 1 else "stay"
    why = "no layout over all of them is predicted to be better"
    return [f"{idle} of {there} machines {stay} unused: {why}"] if idle else []
