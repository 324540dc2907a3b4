"""Makes the plan that a command line asks for, from profile, model, hardware and software."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_optimizer import env
from moe_optimizer.cli import embedded, messages
from moe_optimizer.cli.options import PlanOptions
from moe_optimizer.cli.preflight import check_flags
from moe_optimizer.cli.settings import Setting, Settings, resolve
from moe_optimizer.env import read_environment
from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.log import get_logger

if TYPE_CHECKING:
    from moe_optimizer.plan.plan import Plan
    from moe_optimizer.plan_context.context import WishWithOrigin
    from moe_optimizer.plan_context.request import PlanRequest
    from moe_optimizer.profiles import Profile
    from moe_optimizer.specs.hardware import HardwareSpec
    from moe_optimizer.specs.placement_load import PlacementLoad


LOGGER = get_logger(__name__)
_MEASURED_PASS = "flash_dmoe"
_PLAIN_SHARE = 0.90
"""Share of a GPU's memory that stock vLLM takes at least without an argument (0.92 in vLLM 0.32)."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, with the settings and the profile it was made from."""

    settings: Settings
    profile: Profile
    plan: Plan


def read_settings(options: PlanOptions) -> tuple[Settings, Profile]:
    """Return the settings and the profile they name.

    Raises:
        InputError, UnsupportedError: see `resolve` and `load_profile`.
    """
    from moe_optimizer.profiles import load_profile

    environment = read_environment()
    if environment.plan is not None:
        LOGGER.warning("%s is not used: this command makes a plan of its own", env.PLAN)
    settings = resolve(options, environment)
    with _named_by(settings.values["profile"]):
        return settings, load_profile(settings["profile"])


@contextlib.contextmanager
def _named_by(setting: Setting) -> Iterator[None]:
    """Prefix errors with the flag or variable that the value came from."""
    try:
        yield
    except InputError as error:
        raise error.named_by(setting.said_by) from None


def make(options: PlanOptions, *, measure: Callable[[Plan, Settings], bool] | None = None) -> Planned:
    """Plan what the command line asks for; prints nothing.

    Args:
        options: the command line.
        measure: is given a first plan, may measure what no table answers, and returns whether it did; the plan is then
            made again with the new table.

    Raises:
        InputError, UnsupportedError, DoesNotFitError: the first problem found.
    """
    settings, profile = read_settings(options)
    if settings.disabled:
        share = min(profile.gpu_memory_utilization, _PLAIN_SHARE)
        profile = profile.model_copy(update={"gpu_memory_utilization": share})
    request, warnings = embedded.with_engine(_request(options, settings, profile))
    if request.software.vllm is not None:
        check_flags(request.software.vllm, request.vllm_args)

    from moe_optimizer.inspection import read_kernel_speeds
    from moe_optimizer.planner import make_plan

    if measure is not None and not settings.disabled and request.engine != embedded.ENGINE:
        # A required pass may be undecided until its kernels are measured.
        first = dataclasses.replace(request, required=request.required - {_MEASURED_PASS})
        if measure(make_plan(first), settings):
            software = dataclasses.replace(request.software, kernel_speeds=read_kernel_speeds())
            request = dataclasses.replace(request, software=software)
    plan = make_plan(request)
    if settings.disabled:
        plan = plan.replace(serve_args=plan.plain_args)
    if warnings:
        plan = plan.replace(warnings=(*warnings, *plan.warnings))
    if settings["strict"]:
        refuse_unmet_wishes(plan, profile, settings.wishes)
    return Planned(settings, profile, plan)


def _request(options: PlanOptions, settings: Settings, profile: Profile) -> PlanRequest:
    """Return the request to the planner, with the facts of model, hardware and software.

    Raises:
        InputError, UnsupportedError: a fact cannot be read.
    """
    from moe_optimizer.inspection import ModelInspector, read_software
    from moe_optimizer.inspection.activation_norms import read_activation_norms_file
    from moe_optimizer.inspection.fp8_sensitivity import read_sensitivity_file
    from moe_optimizer.plan.serve_args import ServeArguments
    from moe_optimizer.plan_context.request import PlanRequest
    from moe_optimizer.planner.request_checks import ALLOW_LONG_MODEL_LEN

    dtype = settings["dtype"]
    return PlanRequest(
        model=ModelInspector(trust_remote_code=settings["trust_remote_code"]).inspect(settings["model"]),
        hardware=read_hardware(settings.values["hardware"], settings["gpus"], options.nodes),
        software=read_software(),
        profile=profile,
        num_gpus=settings["gpus"],
        num_nodes=options.nodes,
        one_server=options.one_server,
        wishes=settings.wishes,
        required=settings.required,
        engine=settings["engine"],
        batch_size=settings["batch_size"],
        host=settings["host"],
        port=settings["port"],
        max_model_len=settings["max_model_len"],
        any_model_len=os.environ.get(ALLOW_LONG_MODEL_LEN, "0").strip().lower() in ("1", "true"),
        vllm_args=ServeArguments(*settings["vllm_args"]),
        trust_remote_code=settings["trust_remote_code"],
        dtype=None if dtype == "auto" else dtype,
        expert_load=_read_expert_load(settings, profile),
        fp8_sensitivity=read_sensitivity_file(profile.passes.fp8.sensitivity),
        activation_norms=read_activation_norms_file(profile.passes.sparsity_24.activation_norms),
    )


def _read_expert_load(settings: Settings, profile: Profile) -> PlacementLoad | None:
    """Read the loads named by flags, or else by the profile."""
    from moe_optimizer.inspection.expert_load import read_placement_load

    stated, key = profile.passes.expert_placement, f"profile {profile.name}: passes.expert_placement"
    load, check = settings.values["expert_load"], settings.values["expert_load_check"]
    if load.value is None:
        load = Setting(stated.load, f"{key}.load")
    if check.value is None:
        check = Setting(stated.load_check, f"{key}.load_check")
    return read_placement_load(load.value, check.value, origin=load.said_by, check_origin=check.said_by)


def refuse_unmet_wishes(plan: Plan, profile: Profile, wishes: Mapping[str, WishWithOrigin]) -> None:
    """Check for --strict that the plan has every optimization that was asked for.

    Raises:
        UnsupportedError: a wish was refused.
    """
    from moe_optimizer.passes.registry import all_passes
    from moe_optimizer.plan.decision import Wish

    unmet: list[tuple[str, str, str]] = []
    for optimization in all_passes():
        decision = plan.decision(optimization.name)
        if why_not := optimization.unmet(decision):
            unmet.append((optimization.name, decision.wish_origin, why_not))
        for setting, _ in optimization.setting_flags.values():
            stated = Wish(getattr(getattr(profile.passes, optimization.name), setting))
            wish, origin = wishes.get(f"{optimization.name}.{setting}", (stated, f"profile {profile.name}"))
            why_off = optimization.why_setting_off(decision, setting) if wish is Wish.ON else ""
            if why_off:
                unmet.append((f"{setting} of {optimization.name}", origin, why_off))
    if unmet:
        name, origin, why = unmet[0]
        raise UnsupportedError(f"--strict: {name} ({origin}): {why}", hint="leave --strict out to serve without it")


def read_hardware(named: Setting, num_gpus: int | None, nodes: int = 1) -> HardwareSpec:
    """Return the named machine, or this one if none is named; `num_gpus` counts the GPUs of all machines.

    A named machine has at most the number of GPUs it is sold with; the planner refuses a request for more.

    Raises:
        InputError: no hardware of that name, or GPUs for hardware that has none.
    """
    from moe_optimizer.inspection import load_hardware, probe_hardware

    if named.value is None:
        return probe_hardware()
    each = None if num_gpus is None else -(-num_gpus // nodes)
    with _named_by(named):
        hardware = load_hardware(named.value, each)
    if hardware.gpu is None:
        return hardware
    return dataclasses.replace(hardware, num_gpus=min(hardware.num_gpus, hardware.gpu.max_gpus_per_node))


def show_plan(plan: Plan, *, as_json: bool, explain: bool = False) -> None:
    """Write the plan to stdout, and its warnings to stderr unless a terminal shows them with the plan."""
    import sys

    if as_json:
        messages.write_data(plan.to_json())
    else:
        from moe_optimizer.plan.explain import render_plan

        messages.write_data(
            render_plan(plan, width=messages.output_width(), color=messages.use_color(sys.stdout), explain=explain)
        )
    if as_json or not sys.stdout.isatty():
        messages.write_warnings(plan.warnings)
