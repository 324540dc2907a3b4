"""Reads the plan of a file to serve it as it is, and refuses one that is not for this machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from moe_optimizer.cli.options import AimOptions, PlanOptions, ServeOptions
from moe_optimizer.cli.preflight import check_can_serve_here
from moe_optimizer.cli.settings import resolve
from moe_optimizer.env import DISABLE, read_environment
from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.inspection.hardware_probe import probe_hardware
from moe_optimizer.inspection.vllm_installation import find_vllm
from moe_optimizer.plan.plan import Plan

_NOT_PLANNING = ("model", "model_argument", "verbose", "json", "strict")
"""Options that stand beside a plan: they ask for nothing that it decides."""


def read_plan(options: ServeOptions) -> Plan:
    """Return the plan of `--plan`.

    Raises:
        InputError: an option wants something else planned, the file is no plan, the model is another, or it requires
            what the kill switch has switched off.
        UnsupportedError: it is for another machine or vLLM.
    """
    assert options.plan is not None, "the caller has looked"
    _check_nothing_else_planned(options)
    plan = Plan.load(Path(options.plan))
    check_is_for_here(plan, origin=f"--plan {options.plan}", model=options.named_model)
    settings = resolve(dataclasses.replace(options, model=plan.model.path, model_argument=None), read_environment())
    if settings.disabled:
        _check_requires_nothing(plan, origin=f"--plan {options.plan}")
        plan = plan.stock()
    if not options.dry_run:
        check_can_serve_here(plan, settings)
    return plan


def check_is_for_here(plan: Plan, *, origin: str, model: str | None) -> None:
    """Refuse a plan that was made for something else than what it is to serve, and where.

    Args:
        plan: of a file.
        origin: names it in messages.
        model: that it should be for; None: any.

    Raises:
        InputError: it is for another engine or model.
        UnsupportedError: it is for another machine or vLLM.
    """
    if plan.engine != "vllm":
        raise InputError(f"{origin}: is for engine {plan.engine}, expected one for vllm", hint="serve with --engine")
    if model is not None and model != plan.model.name and os.path.realpath(model) != os.path.realpath(plan.model.path):
        raise InputError(f"{origin}: is for model {plan.model.name}, got {model}", hint="plan for this model")
    here, planned = probe_hardware(), plan.hardware
    if plan.num_gpus and planned.gpu is not None:
        found = f"{here.num_gpus} x {here.gpu.name}" if here.gpu else "no GPU"
        if here.gpu is None or here.gpu.key != planned.gpu.key or here.num_gpus * plan.num_nodes < plan.num_gpus:
            wanted = f"{plan.num_gpus} x {planned.gpu.name}"
            raise UnsupportedError(f"{origin}: is for {wanted}, but this machine has {found}", hint="plan again here")
    vllm = find_vllm()
    if vllm is not None and vllm.version != plan.vllm_version:
        raise UnsupportedError(
            f"{origin}: is for vLLM {plan.vllm_version}, but {vllm.version} is installed", hint="plan again here"
        )


def _check_requires_nothing(plan: Plan, *, origin: str) -> None:
    for decision in plan.decisions:
        if decision.required:
            what = f"{origin}: requires {decision.pass_name}, which contradicts {DISABLE}=1 in the environment"
            raise InputError(what, hint=f"unset {DISABLE}, or plan without --require")


def _check_nothing_else_planned(options: ServeOptions) -> None:
    for _, flag in stated_options(options, AimOptions):
        raise refusal(flag, beside="--plan")


def stated_options(options: PlanOptions, declared: type[PlanOptions]) -> Iterator[tuple[str, str]]:
    """Yield each option of a command line that asks for something that a plan decides: its field and its flag.

    Args:
        options: of the command line.
        declared: has the options to look at.
    """
    for field in dataclasses.fields(declared):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.name in _NOT_PLANNING or getattr(options, field.name) == default:
            continue
        flag = "--" if field.name == "vllm_args" else f"--{field.name.replace('_', '-')}"
        if field.name == "switches":
            name, on = next(iter(options.switches.items()))
            flag = f"--{'enable' if on else 'disable'}-{name}"
        yield field.name, flag


def refusal(flag: str, *, beside: str) -> InputError:
    """Return the error about an option that cannot change a plan's file, which `beside` names."""
    return InputError(f"{beside} and {flag}: the plan is served as it is", hint=f"leave {flag} out, or plan again")
