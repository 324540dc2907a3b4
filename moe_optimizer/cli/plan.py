"""`moe-optimizer plan`: what would be done, and why."""

from __future__ import annotations

from moe_optimizer.cli import messages
from moe_optimizer.cli.options import PlanCommandOptions, takes
from moe_optimizer.errors import ExitCode


@takes(PlanCommandOptions)
def command(options: PlanCommandOptions) -> int:
    """Show what serving would do, and why.

    Prints the model, the hardware, the memory, every decision and the exact vLLM command. With --json it prints the
    plan file that MOE_OPTIMIZER_PLAN takes. Arguments after -- go to vllm serve.
    """
    from moe_optimizer.cli import planning
    from moe_optimizer.cli.show_config import show_config

    with messages.held_messages(verbose=options.verbose):
        if options.show_config:
            show_config(*planning.read_settings(options), as_json=options.json)
            return ExitCode.OK
        planned = planning.make(options)
    planning.show_plan(planned.plan, as_json=options.json, explain=options.explain)
    return ExitCode.OK
