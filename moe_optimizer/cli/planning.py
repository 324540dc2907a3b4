"""Makes the plan that a command line asks for, from profile, model, hardware and software."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer import env
from moe_optimizer.cli import embedded, judgement
from moe_optimizer.cli.options import PlanOptions
from moe_optimizer.cli.settings import Setting, Settings, resolve
from moe_optimizer.env import read_environment
from moe_optimizer.errors import InputError, MoeOptimizerError
from moe_optimizer.log import get_logger, timed

if TYPE_CHECKING:
    from moe_optimizer.plan.plan import Plan
    from moe_optimizer.plan_context.request import PlanRequest
    from moe_optimizer.profiles import Profile
    from moe_optimizer.specs.expert_load import PlacementLoad
    from moe_optimizer.specs.hardware import HardwareSpec


LOGGER = get_logger(__name__)
_PLAIN_SHARE = 0.90
"""Share of a GPU's memory that stock vLLM takes at least without an argument (0.92 in vLLM 0.32)."""


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


def make(options: PlanOptions) -> Plan:
    """Plan what the command line asks for.

    Raises:
        InputError, UnsupportedError, DoesNotFitError: the first problem found.
    """
    settings, request = read_request(options)
    return decide(settings, request)


def decide(settings: Settings, request: PlanRequest) -> Plan:
    """Return the plan that is served; with the kill switch it is the one of stock vLLM.

    Raises:
        InputError, UnsupportedError, DoesNotFitError: see `make_plan`; the embedded engine has no such argument.
    """
    plan = judgement.with_judgement(planned(request))
    if request.engine == embedded.ENGINE and request.vllm_args:
        embedded.check_arguments(plan)
    return plan.stock() if settings.disabled else plan


def decide_before_measuring(request: PlanRequest) -> Plan:
    """Return a plan in which a wished or required pass may be pending until its kernels are measured."""
    return planned(dataclasses.replace(request, strict=False, will_measure=True))


def planned(request: PlanRequest) -> Plan:
    """Return the planner's plan, with a warning where the installed vLLM is too old for the plugin.

    Raises:
        InputError, UnsupportedError, DoesNotFitError: see `make_plan`; what the facts warn of is noted on them.
    """
    from moe_optimizer.planner import make_plan
    from moe_optimizer.vllm_plugin.compat import supported_version

    vllm = request.software.vllm
    why_not = "" if vllm is None else supported_version(vllm.version)[1]
    too_old = (f"the installed vLLM is too old for what the plugin applies: {why_not}",) if why_not else ()
    try:
        plan = _judged_plan(request) or make_plan(request)
    except MoeOptimizerError as error:
        for warning in dict.fromkeys((*too_old, *request.hardware.warnings, *request.model.warnings)):
            error.add_note(warning)
        raise
    return plan.replace(warnings=(*too_old, *plan.warnings)) if too_old else plan


def _judged_plan(request: PlanRequest) -> Plan | None:
    """Return the plan with experts in four bits where the profile leaves them to `auto`, and a quality run has judged
    that plan and allows it; else None.
    """
    from moe_optimizer.plan.decision import Status, Wish
    from moe_optimizer.planner import make_plan

    key = "four_bit"
    if Wish(request.profile.passes.four_bit.mode) is not Wish.AUTO or key in request.wishes:
        return None
    asked = (Wish.ON, f"profile {request.profile.name}, as `quality` allows")
    try:
        plan = make_plan(dataclasses.replace(request, wishes={**request.wishes, key: asked}))
    except MoeOptimizerError:
        return None  # it is not to be had together with what was asked for, and nobody asked for it by name
    return plan if plan.decision(key).status is Status.ON and judgement.allows(plan) else None


def after_measuring(request: PlanRequest) -> PlanRequest:
    """Return the request with the tables of kernel speeds as they are now; with it nothing is pending."""
    from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds

    software = dataclasses.replace(request.software, kernel_speeds=read_kernel_speeds())
    return dataclasses.replace(request, software=software, will_measure=False)


def read_request(options: PlanOptions) -> tuple[Settings, PlanRequest]:
    """Return the settings, and the request to the planner with the facts of model, hardware and software.

    Raises:
        InputError, UnsupportedError: a fact cannot be read, or vLLM has no such flag.
    """
    from moe_optimizer.inspection.activation_norms import read_activation_norms_file
    from moe_optimizer.inspection.draft_model import read_draft
    from moe_optimizer.inspection.layer_sensitivity import read_sensitivity_file
    from moe_optimizer.inspection.model_inspector import ModelInspector
    from moe_optimizer.inspection.software import read_software
    from moe_optimizer.inspection.vllm_sources import check_knows
    from moe_optimizer.plan_context.request import PlanRequest
    from moe_optimizer.planner.request_checks import ALLOW_LONG_MODEL_LEN

    settings, profile = read_settings(options)
    if settings.disabled:
        share = min(profile.gpu_memory_utilization, _PLAIN_SHARE)
        profile = profile.model_copy(update={"gpu_memory_utilization": share})
    dtype = settings["dtype"]
    with timed(LOGGER, "software is read"):
        software = read_software()
    if software.vllm is not None and settings["engine"] == "vllm":
        check_knows(software.vllm, options.vllm_args)
    with timed(LOGGER, "the model is inspected"):
        model = ModelInspector(trust_remote_code=settings["trust_remote_code"]).inspect(settings["model"])
    with timed(LOGGER, "the hardware is read"):
        hardware = read_hardware(settings.values["hardware"], settings["gpus"], options.nodes)
    request = PlanRequest(
        model=model,
        hardware=hardware,
        software=software,
        profile=profile,
        num_gpus=settings["gpus"],
        num_nodes=options.nodes,
        wishes=settings.wishes,
        required=settings.required,
        strict=settings["strict"],
        engine=settings["engine"],
        batch_size=settings["batch_size"],
        clients=settings["clients"],
        goal=settings["goal"],
        ttft_ms=settings["ttft"],
        tpot_ms=settings["tpot"],
        input_tokens=settings["input_tokens"],
        output_tokens=settings["output_tokens"],
        layout=None if settings.disabled else settings["layout"],
        search_layouts=not settings.disabled,
        host=settings["host"],
        port=settings["port"],
        max_model_len=settings["max_model_len"],
        any_model_len=os.environ.get(ALLOW_LONG_MODEL_LEN, "0").strip().lower() in ("1", "true"),
        vllm_args=options.vllm_args,
        trust_remote_code=settings["trust_remote_code"],
        dtype=None if dtype == "auto" else dtype,
        draft=read_draft(profile.passes.speculation.model, origin=f"profile {profile.name}: passes.speculation.model"),
        expert_load=_read_expert_load(options, settings, profile),
        will_measure=settings["calibrate"] > 0 and not settings.disabled,
        fp8_sensitivity=read_sensitivity_file(profile.passes.fp8.sensitivity, "fp8"),
        four_bit_sensitivity=read_sensitivity_file(profile.passes.four_bit.sensitivity, "four_bit"),
        activation_norms=read_activation_norms_file(profile.passes.sparsity_24.activation_norms),
    )
    request, warnings = embedded.with_engine(request)
    for warning in warnings:
        LOGGER.warning("%s", warning)
    return settings, request


def _read_expert_load(options: PlanOptions, settings: Settings, profile: Profile) -> PlacementLoad | None:
    """Read the loads named by flags, or else by the profile.

    Raises:
        InputError: one cannot be read, or is what this run would write itself.
    """
    from moe_optimizer.inspection.expert_load import read_placement_load

    stated, key = profile.passes.expert_placement, f"profile {profile.name}: passes.expert_placement"
    load, check = settings.values["expert_load"], settings.values["expert_load_check"]
    if load.value is None:
        load = Setting(stated.load, f"{key}.load")
    if check.value is None:
        check = Setting(stated.load_check, f"{key}.load_check")
    read = read_placement_load(load.value, check.value, origin=load.said_by, check_origin=check.said_by)
    run_dir = getattr(options, "run_dir", None) or read_environment().run_dir
    if run_dir is not None:
        for stated in (load, check):
            _refuse_own_output(stated, Path(run_dir))
    return read


def _refuse_own_output(load: Setting, run_dir: Path) -> None:
    """Refuse a load that this run removes when it starts, and replaces by its own counts.

    Raises:
        InputError: it is one.
    """
    from moe_optimizer.specs.expert_load import LOAD_FILE, PARTS_DIR

    if load.value is None:
        return
    path = Path(os.path.realpath(load.value))
    counts = path.name == LOAD_FILE or path.parent.name == PARTS_DIR
    if counts and path.is_relative_to(os.path.realpath(run_dir)):
        raise InputError(
            f"{load.said_by}: {load.value} is in the run folder {run_dir}, where this run writes its own counts",
            hint="give this run another folder with --run-dir, or copy the file",
        )


def read_hardware(named: Setting, num_gpus: int | None, nodes: int = 1) -> HardwareSpec:
    """Return the named machine, or this one if none is named; `num_gpus` counts the GPUs of all machines.

    A named machine has at most the number of GPUs it is sold with; the planner refuses a request for more.

    Raises:
        InputError: no hardware of that name, or GPUs for hardware that has none.
    """
    from moe_optimizer.inspection.hardware_probe import load_hardware, probe_hardware

    if named.value is None:
        return probe_hardware()
    each = None if num_gpus is None else -(-num_gpus // nodes)
    with _named_by(named):
        hardware = load_hardware(named.value, each)
    if hardware.gpu is None:
        return hardware
    return dataclasses.replace(hardware, num_gpus=min(hardware.num_gpus, hardware.gpu.max_gpus_per_node))
