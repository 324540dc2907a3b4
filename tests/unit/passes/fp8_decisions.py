"""What the fp8 pass decides, on eight GPUs and on the CPU build."""

from __future__ import annotations

import json
import re
from typing import Any

from moe_optimizer.plan.decision import Decision, Wish
from moe_optimizer.plan_context.context import PlanContext
from tests.builders import context, cpu_machine, decided_by, gpus, profile_with, qwen3_30b_a3b, tiny_moe

ON = {"fp8": (Wish.ON, "flag --enable-fp8")}
WITHOUT_FLASH = {**ON, "flash_dmoe": (Wish.OFF, "flag --disable-flash-dmoe")}


def planned(model, hardware, settings: dict[str, Any] | None = None, **changes: Any) -> PlanContext:
    profile = profile_with("aggressive", {"fp8": settings or {}})
    return decided_by(context(model, hardware, profile, **({"wishes": ON} | changes)), "parallelism", "fp8")


def on_gpu(model=None, name: str = "h100_sxm", settings: dict[str, Any] | None = None, **changes: Any) -> Decision:
    return planned(model or qwen3_30b_a3b(), gpus(name, 8), settings, **changes).decided["fp8"]


def on_cpu(model=None, settings: dict[str, Any] | None = None, **changes: Any) -> Decision:
    return planned(model or tiny_moe(), cpu_machine(), settings, **changes).decided["fp8"]


def quantization_config(decision: Decision) -> dict[str, Any]:
    assert decision.vllm_args.words[:3] == ("--quantization", "online", "--quantization-config")
    return json.loads(decision.vllm_args.words[3])


def is_ignored(config: dict[str, Any], module: str) -> bool:
    """As vLLM compares: from the start of the name."""
    assert all(pattern.startswith("re:") for pattern in config["ignore"])
    return any(re.match(pattern.removeprefix("re:"), module) for pattern in config["ignore"])
