"""Makes a Plan by asking each pass in turn. Reads nothing, starts nothing."""

from __future__ import annotations

import dataclasses
import time

from moe_optimizer.errors import RequiredNotAppliedError, UnsupportedError
from moe_optimizer.log import get_logger
from moe_optimizer.passes.registry import PASS_NAMES, all_passes, check_wishes
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan.server_group import ServerGroup
from moe_optimizer.plan.verify import verify_plan
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.layouts import choose_layout, predicted_as_decided
from moe_optimizer.plan_context.pinned_layout import with_pinned_layout
from moe_optimizer.plan_context.request import PlanRequest
from moe_optimizer.planner.devices import planned_device, usable_gpus, used_gpus
from moe_optimizer.planner.first_context import first_context
from moe_optimizer.planner.memory_fit import memory_under_decisions, require_fit
from moe_optimizer.planner.plan_warnings import plan_warnings
from moe_optimizer.planner.request_checks import check_arguments, check_for_device, check_request
from moe_optimizer.planner.server_arguments import own_arguments, plain_arguments, serve_arguments, serve_environment

_LOGGER = get_logger(__name__)
_WITHOUT = "leave the requirement out to serve without it"


def make_plan(request: PlanRequest) -> Plan:
    """Decide everything for one server.

    Raises:
        InputError: a value of the request is wrong, or two of them contradict each other.
        DoesNotFitError: the weights and one sequence need more memory than there is.
        UnsupportedError: this model, machine or version cannot do what is asked, or a strict request's wish is refused.
        RequiredNotAppliedError: a required pass is not on.
    """
    check_request(request)
    device = planned_device(request)
    check_for_device(request, device)
    num_gpus, gpu_warnings = usable_gpus(request, device)
    context = first_context(request, device, num_gpus)
    check_wishes(context.request.wishes, device)
    asked = with_pinned_layout(context)
    check_arguments(asked.request)
    context = asked.with_layout(choose_layout(asked))
    for optimization in all_passes():
        begin = time.perf_counter()
        decision = _without_users(optimization.decide(context), request.vllm_args)
        _log(decision, time.perf_counter() - begin)
        context = context.with_decision(decision)
    _check_load_balancer(context)
    decisions = tuple(context.decided.values())
    memory = memory_under_decisions(context)
    require_fit(asked, context, memory)
    _require_required(context)
    own_args = own_arguments(request, context)
    serve_args = serve_arguments(own_args, decisions, request.vllm_args)
    plan = Plan(
        model=request.model,
        hardware=request.hardware,
        workload=context.workload,
        profile_name=request.profile.name,
        profile=request.profile.model_dump(mode="json"),
        engine=request.engine,
        vllm_version=request.software.vllm.version if request.software.vllm else None,
        num_gpus=used_gpus(context),
        num_nodes=context.request.num_nodes,
        decisions=decisions,
        memory=memory,
        serve_args=serve_args,
        plain_args=plain_arguments(own_args, context, request.vllm_args),
        serve_env=serve_environment(context),
        group=_server_group(context, serve_args),
        layouts=predicted_as_decided(asked, context, memory),
        warnings=_with_unmet((*gpu_warnings, *plan_warnings(request, context, memory)), decisions, request),
    )
    verify_plan(plan, pass_names=PASS_NAMES, user_args=request.vllm_args)
    if request.strict:
        _require_wishes(plan, request)
    return plan


def _log(decision: Decision, seconds: float) -> None:
    said = f"{decision.pass_name} (asked {decision.wish.value} by {decision.wish_origin}) is {decision.status.value}"
    value = f" ({decision.value})" if decision.status is Status.ON else ""
    _LOGGER.debug("%s%s, decided in %.1f ms: %s", said, value, 1e3 * seconds, decision.reason)


def _check_load_balancer(context: PlanContext) -> None:
    """Refuse the user's own --enable-eplb where vLLM ends on it: it balances whole experts between GPUs."""
    if not context.pinned.is_on("--enable-eplb"):
        return
    if context.device == "cuda" and context.parallelism.expert_parallel:
        return
    on_gpus = "add --enable-expert-parallel and a GPU to share them with, or leave it out"
    raise UnsupportedError(
        "--enable-eplb after -- would end the server: vLLM balances whole experts between GPUs, and none are planned",
        hint="leave it out" if context.device == "cpu" else on_gpus,
    )


def _without_users(decision: Decision, user_args: ServeArguments) -> Decision:
    """Take out of a decision the flags that the user gives, and say so."""
    given = [argument.flag for argument in decision.vllm_args.arguments if argument.flag in user_args]
    if not given:
        return decision
    unsaid = [flag for flag in given if flag not in decision.reason]
    said = f" ({', '.join(unsaid)} given by the user)" if unsaid else ""
    return dataclasses.replace(decision, vllm_args=decision.vllm_args.without(*given), reason=decision.reason + said)


def _require_required(context: PlanContext) -> None:
    for decision in context.decided.values():
        if decision.required and decision.status not in (Status.ON, Status.PENDING):
            # Required by the user, or by another decision that does not work without it.
            asked = context.is_required(decision.pass_name)
            kind = RequiredNotAppliedError if asked else UnsupportedError
            raise kind(
                f"{decision.pass_name} is required ({decision.wish_origin}) and {decision.status.value}: "
                f"{decision.reason}",
                hint=_WITHOUT,
            )
    passes = {each.name: each for each in all_passes()}
    for key in context.request.required:
        name, _, setting = key.partition(".")
        why_off = passes[name].why_setting_off(context.decided[name], setting) if setting else ""
        if why_off:
            raise RequiredNotAppliedError(f"{setting} of {name} is required and off: {why_off}", hint=_WITHOUT)


def _server_group(context: PlanContext, serve_args: ServeArguments) -> ServerGroup | None:
    groups = [
        optimization.server_group(context, serve_args)
        for optimization in all_passes()
        if context.decided[optimization.name].applier is Applier.SERVERS
    ]
    assert len(groups) <= 1, f"two passes make several servers of one: {groups}"
    return groups[0] if groups else None


def _with_unmet(warnings: tuple[str, ...], decisions: tuple[Decision, ...], request: PlanRequest) -> tuple[str, ...]:
    """Return the warnings with one more for each wish that is not carried out and that none of them speaks of."""
    unmet = [
        f"{name} refused ({origin}): {why}"
        for name, origin, why in _unmet_wishes(decisions, request)
        if not any(origin in warning or why in warning for warning in warnings)
    ]
    return (*warnings, *unmet)


def _unmet_wishes(decisions: tuple[Decision, ...], request: PlanRequest) -> list[tuple[str, str, str]]:
    """Return what was asked for and is not carried out: its name, who asked, and why."""
    unmet: list[tuple[str, str, str]] = []
    decided = {decision.pass_name: decision for decision in decisions}
    for optimization in all_passes():
        decision = decided[optimization.name]
        if why_not := optimization.unmet(decision):
            unmet.append((optimization.name, decision.wish_origin, why_not))
        for setting, _ in optimization.setting_flags.values():
            stated = Wish(getattr(getattr(request.profile.passes, optimization.name), setting))
            by_profile = (stated, f"profile {request.profile.name}")
            wish, origin = request.wishes.get(f"{optimization.name}.{setting}", by_profile)
            why_off = optimization.why_setting_off(decision, setting) if wish is Wish.ON else ""
            if why_off:
                unmet.append((f"{setting} of {optimization.name}", origin, why_off))
    return unmet


def _require_wishes(plan: Plan, request: PlanRequest) -> None:
    unmet = _unmet_wishes(plan.decisions, request)
    if unmet:
        name, origin, why = unmet[0]
        raise UnsupportedError(f"--strict: {name} ({origin}): {why}", hint="leave --strict out to serve without it")
