"""Checks in each worker that the planned vLLM arguments took effect.

vLLM may change or drop an argument that its parser accepts and say so only in its log, so its configuration in the
worker is compared with the plan. An FP8 checkpoint needs no argument; its weights are checked here too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moe_optimizer.costs.memory import GIB
from moe_optimizer.errors import described
from moe_optimizer.log import get_logger
from moe_optimizer.plan.decision import Decision
from moe_optimizer.plan.pass_params import Fp8Params, GraphCaptureParams, KvCacheParams, SpeculationParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import Argument, ServeArguments, read_integer
from moe_optimizer.proof.shown import flag_decisions, serves_fp8_checkpoint
from moe_optimizer.specs.layer_name import decoder_layer
from moe_optimizer.vllm_plugin.session import PluginSession
from moe_optimizer.vllm_plugin.worker.captured_graphs import await_capture, captures_graphs
from moe_optimizer.vllm_plugin.worker.drafts import await_drafts, checks_drafts, draft_differences
from moe_optimizer.vllm_plugin.worker.fp8_checkpoint import fp8_in_memory

logger = get_logger(__name__)

_SHOWN_OTHERWISE = (
    "--max-cudagraph-capture-size",
    "--cudagraph-capture-sizes",
    "--quantization",
    "--quantization-config",
    "--speculative-config",
)
"""Flags whose words are not compared with vLLM's configuration: the largest size and what drafts are, and the weights
themselves show FP8."""
_SHOWN_VARIABLES = ("VLLM_USE_DEEP_GEMM_E8M0",)
"""Variables of vLLM that it may set by itself, and that change what is computed."""
_EXPERT_WEIGHT = re.compile(r"\bw(13|2)_weight$")

_SHOWN_BY: Mapping[str, Mapping[str, Callable[[Any], Any]]] = {
    "parallelism": {
        "--tensor-parallel-size": lambda config: config.parallel_config.tensor_parallel_size,
        "--data-parallel-size": lambda config: config.parallel_config.data_parallel_size,
        "--pipeline-parallel-size": lambda config: config.parallel_config.pipeline_parallel_size,
        "--distributed-executor-backend": lambda config: config.parallel_config.distributed_executor_backend,
        "--enable-expert-parallel": lambda config: config.parallel_config.enable_expert_parallel,
    },
    "dual_batch_overlap": {
        "--enable-dbo": lambda config: config.parallel_config.enable_dbo,
        "--all2all-backend": lambda config: config.parallel_config.all2all_backend,
    },
    "scheduler": {
        "--max-num-seqs": lambda config: config.scheduler_config.max_num_seqs,
        "--max-num-batched-tokens": lambda config: config.scheduler_config.max_num_batched_tokens,
        "--performance-mode": lambda config: config.performance_mode,
        "--api-server-count": lambda config: config.parallel_config._api_process_count,
    },
    "speculation": {"--async-scheduling": lambda config: config.scheduler_config.async_scheduling},
    "flash_dmoe": {"--moe-backend": lambda config: config.kernel_config.moe_backend},
    "graph_capture": {
        "--enforce-eager": lambda config: config.model_config.enforce_eager,
    },
    "norm_rope_fusion": {
        "--compilation-config": lambda config: config.compilation_config.pass_config.enable_qk_norm_rope_fusion,
    },
    "kv_cache": {
        "--kv-cache-dtype": lambda config: config.cache_config.cache_dtype,
        "--kv-offloading-size": lambda config: config.cache_config.kv_offloading_size,
        "--kv-offloading-backend": lambda config: config.cache_config.kv_offloading_backend,
    },
}
"""Pass -> flag -> its value in vLLM's configuration."""
_SAME_TYPE = {"fp8": "fp8_e4m3"}
"""A short word for a cache's type -> its name; the width of the elements is compared apart."""


def prove_flags(session: PluginSession, worker: Any, cache_specs: Mapping[str, Any]) -> None:
    """Write into the proof which of the plan's flags this worker's vLLM runs with.

    Args:
        session: this process's. A plan that is made in a running vLLM gives it no flags.
        worker: vLLM's.
        cache_specs: layer -> what vLLM will allocate as its cache.
    """
    if session.plan is None or session.plans_itself:
        return
    for decision in flag_decisions(session.plan):
        try:
            reason, held = _looked_at(decision, session.plan, worker, cache_specs)
        except Exception as error:  # noqa: BLE001 - vLLM is starting; it must go on without us
            reason, held = f"cannot be shown: {described(error)}", ""
        if reason:
            logger.warning("%s (%s): %s", decision.pass_name, decision.value, reason)
            session.refused(decision.pass_name, reason)
        else:
            session.applied(decision.pass_name, kernel="", isa="")
            if captures_graphs(decision):
                await_capture(session, decision)
            if checks_drafts(decision):
                await_drafts(session, decision)
            # Under data parallelism a rank may get no request: it shows what is configured until one comes.
            if not captures_graphs(decision) or worker.vllm_config.parallel_config.data_parallel_size > 1:
                session.ran(decision.pass_name)
        entry = session.proof.passes[decision.pass_name]
        shown = [f"{name}={decision.env[name]}" for name in _SHOWN_VARIABLES if not reason and name in decision.env]
        entry.requested, entry.found = decision.value, ", ".join(filter(None, (held or entry.found, *shown)))


def _looked_at(decision: Decision, plan: Plan, worker: Any, cache_specs: Mapping[str, Any]) -> tuple[str, str]:
    """Return how the worker's vLLM differs from a decision, or "", and what of an FP8 checkpoint it holds, or ""."""
    variables = other_variables(decision, os.environ)
    if serves_fp8_checkpoint(decision):
        stored = fp8_in_memory(worker.model_runner.get_model(), plan.model.expert_format)
        return stored.why_not or "; ".join(variables), stored.found
    found = differences(decision, plan.serve_args, worker.vllm_config, cache_specs) + variables
    if decision.pass_name == "fp8":
        found += unconverted(decision, worker.model_runner.get_model().named_parameters())
    return "; ".join(found), ""


def differences(
    decision: Decision, serve_args: ServeArguments, config: Any, cache_specs: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return every difference between a decision and the configuration that vLLM runs with.

    Args:
        decision: one of `flag_decisions`.
        serve_args: the plan's, which have the arguments that the user gave in place of the decision's.
        config: vLLM's VllmConfig as a worker has it.
        cache_specs: as for `prove_flags`.

    Raises:
        AttributeError: this vLLM's configuration lacks a field.
    """
    shown = _SHOWN_BY.get(decision.pass_name, {})
    own = [each for each in serve_args.arguments if each.flag in shown]
    planned = [each for each in decision.vllm_args.arguments if each.flag not in _SHOWN_OTHERWISE]
    given = {each.flag: each for each in (*planned, *own)}
    found = [_difference(each, shown[each.flag](config), config) for each in given.values()]
    params = decision.params
    if isinstance(params, GraphCaptureParams) and params.max_capture_size:
        largest = config.compilation_config.max_cudagraph_capture_size or 0
        if largest < params.max_capture_size:
            found.append(f"CUDA graphs: vLLM captures up to {largest}, planned {params.max_capture_size}")
    if isinstance(params, SpeculationParams):
        found += draft_differences(params, config.speculative_config)
    if isinstance(params, KvCacheParams) and params.kv_bits == 8:
        wide = sorted(name for name, spec in cache_specs.items() if spec.dtype.itemsize > 1)
        if wide:
            found.append(f"cache: {len(wide)} of {len(cache_specs)} layers keep wider elements, {wide[0]} first")
    if isinstance(params, KvCacheParams) and params.offload_gib is not None:
        found.append(_tier_difference(params.offload_gib, serve_args, config.kv_transfer_config))
    return tuple(filter(None, found))


def _tier_difference(offload_gib: int, serve_args: ServeArguments, transfer: Any) -> str:
    if transfer is None:
        return "vLLM has no KV connector, which offloading to host memory needs"
    if "--kv-offloading-size" in serve_args:
        return ""
    # Beside disaggregation it is one of two connectors, and no flag has its size.
    extras = [
        each.get("kv_connector_extra_config", {})
        for each in transfer.kv_connector_extra_config.get("connectors", ())
        if each["kv_connector"] == "OffloadingConnector"
    ]
    sizes = [extra.get("cpu_bytes_to_use") for extra in extras]
    if sizes == [offload_gib * GIB]:
        return ""
    return f"offloading to host memory: vLLM's {transfer.kv_connector} has {sizes} bytes, planned {offload_gib} GiB"


def other_variables(decision: Decision, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return which of a decision's variables that change numbers have another value in this process: vLLM sets some
    for itself by what the model's configuration says.
    """
    wrong = [(name, environ.get(name)) for name in _SHOWN_VARIABLES if name in decision.env]
    return tuple(
        f"{name}: the worker has {'none' if value is None else value}, planned {decision.env[name]}"
        for name, value in wrong
        if value != decision.env[name]
    )


def unconverted(decision: Decision, parameters: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    """Return which weights of a loaded model are wider than the planned FP8.

    Args:
        decision: that of fp8, carried out by vLLM.
        parameters: of the loaded model, by name; torch tensors.
    """
    params = decision.params_as(Fp8Params)
    experts: list[tuple[str, int]] = []
    linears: list[int] = []
    for name, weight in parameters:
        if decoder_layer(name) in params.excluded_layers:
            continue
        if _EXPERT_WEIGHT.search(name):
            experts.append((name, weight.element_size()))
        elif weight.dim() > 1:  # biases and norms stay
            linears.append(weight.element_size())
    found = []
    wide = [name for name, size in experts if size > 1]
    if params.expert_bits is not None and (wide or not experts):
        first = f", {wide[0]} first" if wide else ""
        found.append(f"experts: {len(wide)} of {len(experts)} weights are not in FP8{first}")
    if params.linear_bits is not None and 1 not in linears:
        found.append(f"linears: none of {len(linears)} matrices is in FP8")
    return tuple(found)


def _difference(argument: Argument, got: Any, config: Any) -> str:
    # A bare flag switches something on.
    wanted = {"": "True", "true": "True", "false": "False"}.get(argument.value, argument.value)
    if _same(got, wanted, argument.flag) or _is_one_of_several_engines(argument, got, config):
        return ""
    return f"{argument.flag}: vLLM runs with {got}, planned {wanted}"


def _same(got: Any, wanted: str, flag: str) -> bool:
    """Return whether a value in vLLM's configuration is that of an argument; "auto" leaves the choice to vLLM."""
    if isinstance(got, float):
        return got == float(wanted)
    if isinstance(got, int) and not isinstance(got, bool):
        return got == read_integer(wanted, flag=flag)
    return wanted == "auto" or _SAME_TYPE.get(str(got), str(got)) == _SAME_TYPE.get(wanted, wanted)


def _is_one_of_several_engines(argument: Argument, got: Any, config: Any) -> bool:
    """Return whether this is one copy of a model without experts: vLLM makes an engine of each, which knows of no
    other. The proofs of all show how many there are (`proof.verdict`).
    """
    return argument.flag == "--data-parallel-size" and got == 1 and not config.model_config.is_moe
