"""Asks AISimulate or AIConfigurator, its predecessor, where one is installed (extra `predict`), what it estimates of
the planned layout.

It loads its tables for 10 to 30 seconds, so only `plan --explain` asks it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import io
import logging
import math
import textwrap
import warnings
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from moe_optimizer.costs.weights import stored_linear_bits
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.layout_choice import OtherEstimate
from moe_optimizer.plan.pass_params import FourBitParams, Fp8Params, KvCacheParams, SchedulerParams
from moe_optimizer.specs.expert_formats import INT4, MXFP4

if TYPE_CHECKING:
    from moe_optimizer.plan.layout_choice import LayoutChoice
    from moe_optimizer.plan.plan import Plan
    from moe_optimizer.specs.model import ModelSpec

_PREDICTORS = {
    "aisimulate": ("AISimulate", "aisimulate.legacy_cli.api"),
    "aiconfigurator": ("AIConfigurator", "aiconfigurator.cli.api"),
}
"""Package -> its name, and its module with the call that both have. The successor first."""
_SYSTEMS = {"h100_sxm": "h100_sxm", "h200": "h200_sxm", "a100_80gb": "a100_sxm", "b200": "b200_sxm"}
"""Our GPU -> its system."""
_MOST = 0.25
"""A difference above which the plan says that the two disagree."""
_FOUR_BITS = {MXFP4: "w4a16_mxfp4", INT4: "int4_wo"}
"""Our format of experts -> its name."""
_WHOLE = "bfloat16"
"""Its name of 16 bits, of either type."""
_FP8_BITS, _WHOLE_BITS = 8, 16
_PARTS = {"moe_quant_mode": "experts", "gemm_quant_mode": "other matrices", "kvcache_quant_mode": "cache"}
"""Its argument -> what has that format."""
_MESSAGE = 160
"""Characters of its error that are shown."""


class _Question(NamedTuple):
    package: str
    system: str
    choice: LayoutChoice


def with_other_estimate(plan: Plan) -> Plan:
    """Return the plan with the other predictor's estimate of its layout, or with why there is none; the same plan where
    no predictor is installed, or it does not know the GPU.
    """
    question = _question(plan)
    if question is None:
        return plan
    other = OtherEstimate(name=f"{_PREDICTORS[question.package][0]} {metadata.version(question.package)}")
    try:
        formats = _formats(plan)
        tpot, rate = _ask(question, plan, formats)
    except Exception as error:  # noqa: BLE001 - a package of others, asked for a second opinion only
        other = dataclasses.replace(other, why_none=textwrap.shorten(str(error) or repr(error), _MESSAGE))
    else:
        ours = question.choice.estimate
        apart = max(abs(ours.tpot_ms / tpot - 1), abs(ours.tokens_per_s / rate - 1))
        other = dataclasses.replace(
            other,
            formats=", ".join(f"{_PARTS[key]} {value}" for key, value in formats.items()),
            tpot_ms=float(f"{tpot:.4g}"),
            tokens_per_s=float(f"{rate:.4g}"),
            differs=apart > _MOST,
        )
    return plan.replace(layouts=dataclasses.replace(question.choice, other=other))


def where_other_estimate(plan: Plan) -> str:
    """Return which command shows the other predictor's estimate of a plan; "": none would."""
    question = _question(plan)
    if question is None:
        return ""
    return f"{_PREDICTORS[question.package][0]} is installed: `plan --explain` shows its estimate beside ours"


def _question(plan: Plan) -> _Question | None:
    gpu = plan.hardware.gpu
    package = next((each for each in _PREDICTORS if importlib.util.find_spec(each) is not None), None)
    if package is None or plan.layouts is None or gpu is None or gpu.key not in _SYSTEMS:
        return None
    return _Question(package, _SYSTEMS[gpu.key], plan.layouts)


def _formats(plan: Plan) -> dict[str, str]:
    """Return how it is asked for the decided formats of experts, other matrices and cache.

    All three are stated: of a checkpoint in FP8 it would take the cache for FP8 too.

    Raises:
        LookupError: it has no name for one of them.
    """
    cache = plan.decision("kv_cache").params_as(KvCacheParams).kv_bits
    if cache not in (_FP8_BITS, _WHOLE_BITS):
        raise LookupError(f"it does not know a cache of {cache} bits")
    experts, linears = _weights(plan)
    return {
        "moe_quant_mode": experts,
        "gemm_quant_mode": linears,
        "kvcache_quant_mode": "fp8" if cache == _FP8_BITS else _WHOLE,
    }


def _weights(plan: Plan) -> tuple[str, str]:
    """Return its names of the formats of experts and other matrices."""
    experts, linears = _stored_experts(plan.model), _stored_linears(plan.model)
    given = plan.serve_args.value("--quantization") or ""
    if plan.model.quant_method is None and "fp8" in given:
        experts = linears = "fp8_block" if "block" in given else "fp8"
    kept: tuple[int, ...] = ()
    if plan.decision("fp8").status is Status.ON:
        fp8 = plan.decision("fp8").params_as(Fp8Params)
        name = "fp8_block" if fp8.granularity == "block" else "fp8"
        experts = name if fp8.expert_bits else experts
        linears = name if fp8.linear_bits else linears
        kept += fp8.excluded_layers
    if plan.decision("four_bit").status is Status.ON:
        four = plan.decision("four_bit").params_as(FourBitParams)
        experts = _FOUR_BITS[four.weight_format]
        kept += four.excluded_layers
    if kept:
        raise LookupError(f"it does not know a model of which some layers keep their format ({len(set(kept))} do)")
    return experts, linears


def _stored_experts(model: ModelSpec) -> str:
    fp8 = "fp8_block" if model.weight_block is not None else "fp8"
    names = {"dtype": _WHOLE, "none": _WHOLE, "fp8": fp8, **_FOUR_BITS}
    if model.expert_format not in names:
        raise LookupError(f"it does not know experts as this {model.quant_method} checkpoint stores them")
    return names[model.expert_format]


def _stored_linears(model: ModelSpec) -> str:
    bits = stored_linear_bits(model)
    if bits >= _WHOLE_BITS:
        return _WHOLE
    if model.weights_are_fp8 and bits == _FP8_BITS:
        return "fp8_block" if model.weight_block is not None else "fp8"
    if model.expert_format == INT4 and bits < _FP8_BITS:
        return "int4_wo"
    raise LookupError(f"it does not know matrices of {bits:g} bits as this {model.quant_method} checkpoint stores them")


def _ask(question: _Question, plan: Plan, formats: Mapping[str, str]) -> tuple[float, float]:
    """Return its TPOT in ms, and the tokens/s of all servers."""
    choice, layout = question.choice, question.choice.layout
    step = plan.decision("scheduler").params_as(SchedulerParams)
    module = _PREDICTORS[question.package][1]
    engines = layout.num_engines
    batch = max(1, math.ceil(choice.clients / engines) - choice.estimate.waiting)
    size = layout.devices_of_stage
    # Of whole servers it estimates one, of prefill and decode servers all together.
    estimated, split = layout.data_parallel_size, dict[str, str | int]()
    if layout.disaggregated:
        estimated = engines
        split = {
            "mode": "disagg",
            "prefill_batch_size": max(1, step.max_num_batched_tokens // plan.workload.input_tokens),
            "prefill_num_workers": layout.prefill_servers,
            "decode_batch_size": batch,
            "decode_num_workers": layout.replicas,
        }
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        was_disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            found = importlib.import_module(module).cli_estimate(
                plan.model.path,
                question.system,
                backend_name="vllm",
                isl=plan.workload.input_tokens,
                osl=plan.workload.output_tokens,
                batch_size=batch,
                ctx_tokens=step.max_num_batched_tokens,
                tp_size=layout.tensor_parallel_size,
                pp_size=layout.pipeline_parallel_size,
                attention_dp_size=layout.data_parallel_size,
                moe_tp_size=1 if layout.expert_parallel else size,
                moe_ep_size=size if layout.expert_parallel else 1,
                **formats,
                **split,
            )
        finally:
            logging.disable(was_disabled)
    active = min(choice.clients, batch * engines) / (batch * estimated)
    return float(found.tpot), float(found.tokens_per_second) * active
