"""What plans are made from: requests, profiles, measured loads, and the context of a pass."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping
from typing import Any

from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.request import PlanRequest, WishWithOrigin
from moe_optimizer.planner import make_plan
from moe_optimizer.profiles import load_profile as _read_profile
from moe_optimizer.profiles.schema import Profile
from moe_optimizer.specs.expert_load import ExpertLoad, LayerLoad, LoadFile, PlacementLoad
from moe_optimizer.specs.hardware import HardwareSpec
from moe_optimizer.specs.model import ModelSpec
from moe_optimizer.specs.workload import WorkloadSpec
from tests.builders.machines import software

# Profiles are frozen: one reading is enough.
_shipped = functools.cache(_read_profile)


def request(
    model: ModelSpec, hardware: HardwareSpec, profile: str | Profile = "balanced", **changes: Any
) -> PlanRequest:
    """Return a request for a profile, with the vLLM build that fits the machine."""
    fields: dict[str, Any] = {
        "model": model,
        "hardware": hardware,
        "software": software("cuda" if hardware.gpu else "cpu"),
        "profile": _shipped(profile) if isinstance(profile, str) else profile,
    }
    if "vllm_args" in changes:
        changes["vllm_args"] = ServeArguments(*changes["vllm_args"])
    return PlanRequest(**(fields | changes))


def made_plan(model: ModelSpec, hardware: HardwareSpec, profile: str | Profile = "balanced", **changes: Any) -> Plan:
    """Return the plan of such a request."""
    return make_plan(request(model, hardware, profile, **changes))


def profile_with(base: str = "balanced", passes: dict[str, dict[str, Any]] | None = None, **changes: Any) -> Profile:
    """Return a shipped profile with fields, and settings of passes, changed."""
    data = _shipped(base).model_dump()
    for name, settings in (passes or {}).items():
        data["passes"][name] |= settings
    return Profile.model_validate(data | changes)


def expert_load(model: ModelSpec, /, *, seed: int = 0, skew: float = 1.0, **changes: Any) -> ExpertLoad:
    """Return a load of the model's experts: log-normal, the same busy experts for every seed, the rest of it not."""
    busy, rest = random.Random(0), random.Random(f"rest {seed}")
    layers = tuple(
        LayerLoad(
            index=index,
            name=f"model.layers.{index}.mlp.experts",
            tokens=tuple(
                round(1000 * busy.lognormvariate(0, skew) * rest.lognormvariate(0, 0.1))
                for _ in range(model.num_experts)
            ),
        )
        for index in model.moe_layers
    )
    fields: dict[str, Any] = {
        "model": model.path,
        "num_experts": model.num_experts,
        "layers": layers,
        "since": "2026-11-20T12:00:00+00:00",
        "steps": 1000,
    }
    return ExpertLoad(**(fields | changes))


def placement_load(model: ModelSpec, /, *, checked: bool = True, **changes: Any) -> PlacementLoad:
    """Return what a plan is given to place by: two loads of like traffic, or one."""
    return PlacementLoad(
        placed_by=LoadFile(path="monday.json", load=expert_load(model, seed=1, **changes)),
        checked_on=LoadFile(path="tuesday.json", load=expert_load(model, seed=2, **changes)) if checked else None,
    )


OURS: Mapping[str, WishWithOrigin] = {"flash_dmoe": (Wish.ON, "flag --enable-flash-dmoe")}
"""What has our kernel used where nothing was measured."""


def context(model: ModelSpec, hardware: HardwareSpec, profile: Profile | None = None, **changes: Any) -> PlanContext:
    """Return what a pass is given, before any decision; `changes` of its own fields and of its request's.

    `pinned` are the user's own arguments by their flags, see `pinned_arguments`.
    """
    profile = profile or _shipped("balanced")
    if "pinned" in changes:
        changes["vllm_args"] = pinned_arguments(changes.pop("pinned")).words
    fields: dict[str, Any] = {
        "workload": WorkloadSpec(
            batch_size=profile.workload.batch_size,
            input_tokens=profile.workload.input_tokens,
            output_tokens=profile.workload.output_tokens,
            max_model_len=profile.max_model_len,
        ),
        "device": "cuda" if hardware.gpu else "cpu",
        "num_gpus": hardware.num_gpus,
        "dtype": model.dtype,
    }
    of_context = {field.name for field in dataclasses.fields(PlanContext)}
    own = {key: value for key, value in changes.items() if key in of_context}
    asked = {key: value for key, value in changes.items() if key not in of_context}
    return PlanContext(request=request(model, hardware, profile, **asked), **(fields | own))


def asking(ctx: PlanContext, **changes: Any) -> PlanContext:
    """Return the context of a request that is changed."""
    return dataclasses.replace(ctx, request=dataclasses.replace(ctx.request, **changes))


def pinned_arguments(values: ServeArguments | Mapping[str, str]) -> ServeArguments:
    """Return the user's own arguments from their values; "" for a bare flag, "false" for its --no- form."""
    if isinstance(values, ServeArguments):
        return values
    words = []
    for flag, value in values.items():
        words += [f"--no-{flag[2:]}"] if value == "false" else [flag, value] if value else [flag]
    return ServeArguments(*words)


def with_arguments(plan: Plan, *words: str) -> Plan:
    """Return the plan with further arguments of `vllm serve` in the place of its own."""
    return plan.replace(serve_args=plan.serve_args.overridden_by(ServeArguments(*words)))


def decided_by(ctx: PlanContext, *names: str) -> PlanContext:
    """Return the context after the named passes have decided, in that order."""
    from moe_optimizer.passes.registry import all_passes

    passes = {each.name: each for each in all_passes()}
    for name in names:
        ctx = ctx.with_decision(passes[name].decide(ctx))
    return ctx
