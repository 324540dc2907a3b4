"""Runs `moe-optimizer plan`: shows what serving would do, and why."""

from __future__ import annotations

import functools
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

from moe_optimizer.cli import messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.options import PlanCommandOptions
from moe_optimizer.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from moe_optimizer.plan.plan import Plan


_NO_GPU = "No GPU was found here: this is the plan for the CPU. For another machine: --hardware with one of {names}."


def _check_can_be_rendered(plan: Plan, render: str) -> None:
    """Refuse a plan that the printed commands could not start.

    Raises:
        InputError: Ray on one machine.
        UnsupportedError: a plan without GPUs, or for servers behind a router on one machine.
    """
    if not plan.num_gpus:
        raise UnsupportedError("--render: several machines are planned for GPUs only")
    if render == "ray" and plan.num_nodes == 1:
        raise InputError("--render ray: got a plan for one machine, expected one for several (--nodes 2 or more)",
                         hint="start one machine with: moe-optimizer serve")  # fmt: skip
    if plan.group is not None and plan.num_nodes == 1:
        raise UnsupportedError("--render: servers behind a router on one machine are started by the launcher",
                               hint="start them with: moe-optimizer serve")  # fmt: skip


@takes(PlanCommandOptions)
def command(options: PlanCommandOptions) -> messages.Output:
    """Show what serving would do, and why.

    Prints the model, the hardware, the memory, every decision and the exact vLLM command. --json prints the plan file
    that MOE_OPTIMIZER_PLAN takes, --render what starts the plan on several machines. Arguments after -- go to
    vllm serve.
    """
    from moe_optimizer.cli import planning

    if options.render is None:
        plan = planning.make(options)
        if options.explain:
            from moe_optimizer.cli.other_predictor import with_other_estimate

            plan = with_other_estimate(plan)
        return plan_output(plan, as_json=options.json, explain=options.explain)
    if options.json:
        raise InputError("--render and --json contradict each other", hint="give one of them")
    plan = planning.make(options)
    _check_can_be_rendered(plan, options.render)

    from moe_optimizer.plan.leader_worker_set import render_lws
    from moe_optimizer.plan.machine_commands import render_machines

    render = {"ray": render_machines, "lws": render_lws}[options.render]
    return messages.Output(result=plan, render=render, notes=messages.warning_lines(plan.warnings))


def plan_output(plan: Plan, *, as_json: bool, explain: bool = False) -> messages.Output:
    """Return the plan for stdout, and its warnings for stderr unless a terminal shows them with the plan."""
    from moe_optimizer.cli.other_predictor import where_other_estimate
    from moe_optimizer.inspection.hardware_catalog import hardware_names
    from moe_optimizer.plan.explain import render_plan

    color = messages.use_color(sys.stdout)
    width = messages.output_width()
    render = functools.partial(render_plan, width=width, color=color, explain=explain)
    if plan.hardware.origin == "probed" and plan.hardware.gpu is None:
        head = textwrap.fill(_NO_GPU.format(names=", ".join(hardware_names())), width)
        return _output(plan, lambda shown: f"{head}\n\n{render(shown)}", as_json=as_json)
    where = "" if as_json or explain else where_other_estimate(plan)
    return _output(plan, render, as_json=as_json, notes=(where,) if where else ())


def _output(
    plan: Plan, render: Callable[[Plan], str], *, as_json: bool, notes: tuple[str, ...] = ()
) -> messages.Output:
    told = sys.stdout.isatty() and not as_json
    warned = () if told else messages.warning_lines(plan.warnings)
    return messages.Output(result=plan, render=render, notes=(*warned, *notes))
