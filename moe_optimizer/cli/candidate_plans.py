"""Makes the plans of the candidates of a tuning: passes off, other arguments, or stock vLLM."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from pathlib import Path

from moe_optimizer import env
from moe_optimizer.cli import planning
from moe_optimizer.cli.measuring_options import TuneOptions
from moe_optimizer.cli.preflight import check_can_serve_here
from moe_optimizer.cli.progress import ProgressLines
from moe_optimizer.cli.sides import check_side
from moe_optimizer.cli.speed_questions import measure_if_needed
from moe_optimizer.errors import InputError
from moe_optimizer.measure.bench.side import STOCK, Side
from moe_optimizer.measure.tune.trial import STOCK as STOCK_CANDIDATE
from moe_optimizer.measure.tune.trial import Candidate
from moe_optimizer.passes.registry import PASS_NAMES
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.request import PlanRequest
from moe_optimizer.process_environment import changed_environment

_ORIGIN = "tune"
_NAME = 60
"""Characters of a side's name, for lines of progress."""
_STAYS = "parallelism"
"""How devices share the model is no optimization that could be off."""


class CandidatePlans:
    """Plans that differ from what a command line asks for.

    Args:
        options: the command line.
        lines: takes what is done before anything can be planned.
        run_dir, fits: as of `sides_of`.
        calibrate: whether to measure kernels, where no table of their speeds fits.

    Raises:
        InputError: the environment switches everything off.
        MoeOptimizerError: nothing can be planned, or served here, like this.
    """

    def __init__(
        self,
        options: TuneOptions,
        lines: ProgressLines,
        *,
        run_dir: Path,
        fits: Callable[[str, int], None],
        calibrate: bool,
    ) -> None:
        self._checked: set[frozenset[str]] = set()
        self._settings, request = planning.read_request(options)
        if self._settings.disabled:
            raise InputError(f"{env.DISABLE}: got 1, expected a plan to tune", hint=f"unset {env.DISABLE}")
        if request.engine != "vllm":
            raise InputError(f"--engine: got {request.engine}, expected vllm: tune measures what vLLM serves")
        plain = dataclasses.replace(options, switches={}, require=[], strict=False)
        with changed_environment({env.DISABLE: "1"}):
            self._stock_settings, stock = planning.read_request(plain)
        # A plan that is written is read later, where this variable is not set.
        wishes = {key: (wish, _ORIGIN if wish is Wish.OFF else origin) for key, (wish, origin) in stock.wishes.items()}
        self._stock_request = dataclasses.replace(stock, wishes=wishes)
        unmeasured = planning.decide_before_measuring(request)
        check_can_serve_here(unmeasured, self._settings)
        for side in (Side(name="the plan", plan=unmeasured), self.side(STOCK_CANDIDATE, 1)):
            check_side(side, run_dir=run_dir, fits=fits)
        if calibrate:
            measure_if_needed(unmeasured, self._settings["calibrate"], lines)
        self._request = planning.after_measuring(request)

    def plan(self, candidate: Candidate, number: int = 0) -> Plan:
        """Return the plan of a candidate on the port of side `number`.

        Raises:
            MoeOptimizerError: nothing can be planned, or served here, like this.
        """
        settings = self._stock_settings if candidate.stock else self._settings
        request = self._stock_request if candidate.stock else self._changed(candidate)
        plan = planning.decide(settings, dataclasses.replace(request, port=request.port + number))
        if candidate.arguments:
            # What was tried is ours, not the user's: stock vLLM does without.
            plan = plan.replace(plain_args=self.plan(STOCK_CANDIDATE, number).plain_args)
        # What is checked depends on the model, the machine and which flags there are, not on their values.
        flags = frozenset(plan.serve_args.values)
        if flags not in self._checked:
            check_can_serve_here(plan, settings)
            self._checked.add(flags)
        return plan

    def side(self, candidate: Candidate, number: int) -> Side:
        """Return what a benchmark serves for a candidate, as side `number`.

        Raises:
            MoeOptimizerError: as `plan`.
        """
        return Side(
            name=STOCK if candidate.stock else textwrap.shorten(f"{candidate}", _NAME, placeholder=" ..."),
            plan=self.plan(candidate, number),
        )

    def _changed(self, candidate: Candidate) -> PlanRequest:
        off = candidate.off & frozenset(PASS_NAMES) - {_STAYS}
        wishes = {key: wish for key, wish in self._request.wishes.items() if key.partition(".")[0] not in off}
        arguments = self._request.vllm_args.overridden_by(ServeArguments(*_words(candidate)))
        wishes |= dict.fromkeys(off, (Wish.OFF, _ORIGIN)) | dict.fromkeys(candidate.on, (Wish.ON, _ORIGIN))
        return dataclasses.replace(self._request, wishes=wishes, vllm_args=arguments)


def _words(candidate: Candidate) -> list[str]:
    words: list[str] = []
    for flag, value in candidate.arguments:
        words += [f"--no-{flag[2:]}"] if value == "false" else [flag, value] if value else [flag]
    return words
