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
import warnings
from importlib import metadata
from typing import TYPE_CHECKING

from moe_optimizer.plan.layout_choice import OtherEstimate
from moe_optimizer.plan.pass_params import SchedulerParams

if TYPE_CHECKING:
    from moe_optimizer.plan.layout_choice import LayoutChoice
    from moe_optimizer.plan.plan import Plan

_PREDICTORS = {
    "aisimulate": ("AISimulate", "aisimulate.legacy_cli.api"),
    "aiconfigurator": ("AIConfigurator", "aiconfigurator.cli.api"),
}
"""Package -> its name, and its module with the call that both have. The successor first."""
_SYSTEMS = {"h100_sxm": "h100_sxm", "h200": "h200_sxm", "a100_80gb": "a100_sxm", "b200": "b200_sxm"}
"""Our GPU -> its system."""
_MOST = 0.25
"""A difference above which the plan says that the two disagree."""


def with_other_estimate(plan: Plan) -> Plan:
    """Return the plan with the other predictor's estimate of its layout; the same plan where none is installed, or it
    has no data for model or GPU.
    """
    choice, gpu = plan.layouts, plan.hardware.gpu
    if choice is None or gpu is None or gpu.key not in _SYSTEMS:
        return plan
    package = next((each for each in _PREDICTORS if importlib.util.find_spec(each) is not None), None)
    if package is None:
        return plan
    found = _ask(package, plan, choice, _SYSTEMS[gpu.key])
    if found is None:
        return plan
    return plan.replace(layouts=dataclasses.replace(choice, other=found))


def _ask(package: str, plan: Plan, choice: LayoutChoice, system: str) -> OtherEstimate | None:
    layout, ours = choice.layout, choice.estimate
    step = plan.decision("scheduler").params_as(SchedulerParams)
    title, module = _PREDICTORS[package]
    engines = layout.num_engines
    batch = max(1, math.ceil(choice.clients / engines) - ours.waiting)
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
                system,
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
                **split,
            )
        except Exception:  # noqa: BLE001 - a package of others, asked for a second opinion only
            return None
        finally:
            logging.disable(was_disabled)
    active = min(choice.clients, batch * engines) / (batch * estimated)
    tpot, rate = float(found.tpot), float(found.tokens_per_second) * active
    apart = max(abs(ours.tpot_ms / tpot - 1), abs(ours.tokens_per_s / rate - 1))
    return OtherEstimate(
        name=f"{title} {metadata.version(package)}",
        tpot_ms=float(f"{tpot:.4g}"),
        tokens_per_s=float(f"{rate:.4g}"),
        differs=apart > _MOST,
    )
