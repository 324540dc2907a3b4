"""Plans for several machines."""

from __future__ import annotations

import dataclasses
from typing import Any

from moe_optimizer.plan.plan import Plan
from moe_optimizer.specs.model import ModelSpec
from tests.builders import deepseek_v3, gpus, made_plan, qwen3_30b_a3b


def bf16_deepseek() -> ModelSpec:
    model = deepseek_v3()
    stored = {"weight_bytes": 2 * model.total_params, "expert_weight_bytes": 2 * model.expert_params}
    return dataclasses.replace(
        model, quant_method=None, weights_are_fp8=False, weight_bits=16.0, weight_block=None, **stored
    )


_PINNED = {"replicas": "tp8x2", "apart": "tp4p1d3", "copies": "tp2dp8ep", "pipeline": "tp8pp2"}


def plan(kind: str, **changes: Any) -> Plan:
    """Return a plan for two machines of eight GPUs."""
    model, machine = (qwen3_30b_a3b(), "h100_sxm") if kind in ("replicas", "apart") else (bf16_deepseek(), "h200")
    pinned = {"layout": _PINNED[kind]} if kind in _PINNED else {}
    fields = {"num_nodes": 2, "num_gpus": 16, **pinned, **changes}
    return made_plan(model, gpus(machine, 8), "balanced", **fields)
