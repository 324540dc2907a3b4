"""Models, machines and requests for planning tests: built by hand, but for the bundled model."""

from __future__ import annotations

from tests.builders.machines import CPU_HASH, QWEN_LAYER, cpu_machine, gpus, kernel_speeds, software, with_speeds
from tests.builders.models import (
    deepseek_v3,
    dense_model,
    gpt_oss_20b,
    gpt_oss_120b,
    mixtral_8x7b,
    qwen3_30b_a3b,
    qwen3_30b_a3b_fp8,
    qwen3_30b_a3b_int4,
    shaped_model,
    tiny_moe,
    tiny_moe_int4,
)
from tests.builders.plans import (
    OURS,
    asking,
    context,
    decided_by,
    expert_load,
    made_plan,
    placement_load,
    profile_with,
    request,
    with_arguments,
)

__all__ = [
    "CPU_HASH",
    "OURS",
    "QWEN_LAYER",
    "asking",
    "context",
    "cpu_machine",
    "decided_by",
    "deepseek_v3",
    "dense_model",
    "expert_load",
    "gpt_oss_20b",
    "gpt_oss_120b",
    "gpus",
    "kernel_speeds",
    "made_plan",
    "mixtral_8x7b",
    "placement_load",
    "profile_with",
    "qwen3_30b_a3b",
    "qwen3_30b_a3b_fp8",
    "qwen3_30b_a3b_int4",
    "request",
    "shaped_model",
    "software",
    "tiny_moe",
    "tiny_moe_int4",
    "with_arguments",
    "with_speeds",
]
