"""Runs `moe-optimizer plan`: shows what serving would do, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_optimizer.cli import messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.option_values import check_choice
from moe_optimizer.cli.options import RENDERINGS, PlanCommandOptions
from moe_optimizer.errors import ExitCode, InputError, UnsupportedError

if TYPE_CHECKING:
    from moe_optimizer.plan.plan import Plan


def _check_can_be_rendered(plan: Plan, render: str) -> None:
    """Refuse a plan that the printed commands could not start.

    Raises:
        InputError: Ray on one machine.
        UnsupportedError: a plan without GPUs, or for servers behind a router.
    """
    if not plan.num_gpus:
        raise UnsupportedError("--render: several machines are planned for GPUs only")
    if plan.group is not None:
        raise UnsupportedError("--render: servers behind a router run on one machine, and the launcher starts them",
                               hint="start them with: moe-optimizer serve")  # fmt: skip
    if render == "ray" and plan.num_nodes == 1:
        raise InputError("--render ray: got one machine, expected --nodes 2 or more",
                         hint="start one machine with: moe-optimizer serve")  # fmt: skip


@takes(PlanCommandOptions)
def command(options: PlanCommandOptions) -> int:
    """Show what serving would do, and why.

    Prints the model, the hardware, the memory, every decision and the exact vLLM command. --json prints the plan file
    that MOE_OPTIMIZER_PLAN takes, --render what starts the plan on several machines. Arguments after -- go to
    vllm serve.
    """
    from moe_optimizer.cli import planning
    from moe_optimizer.cli.show_config import shows_config

    with messages.held_messages(verbose=options.verbose):
        if shows_config(options):
            return ExitCode.OK
        check_choice("--render", options.render, RENDERINGS)
        if options.render is not None and options.json:
            raise InputError("--render and --json contradict each other", hint="give one of them")
        planned = planning.make(options)
        if options.render is not None:
            _check_can_be_rendered(planned.plan, options.render)
    if options.render is not None:
        from moe_optimizer.plan.multi_node import render_lws, render_ray

        messages.write_data({"ray": render_ray, "lws": render_lws}[options.render](planned.plan))
        messages.write_warnings(planned.plan.warnings)
        return ExitCode.OK
    planning.show_plan(planned.plan, as_json=options.json, explain=options.explain)
    return ExitCode.OK
