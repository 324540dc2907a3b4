"""Measures candidates with real servers: in pairs as `bench` does, alone with an early end, and judged by `quality`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shutil
import signal
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from types import FrameType

from moe_optimizer.errors import MoeOptimizerError
from moe_optimizer.launcher.deployment import STOP_MARGIN_S
from moe_optimizer.measure.bench.request import BenchRequest
from moe_optimizer.measure.bench.run import Handling, MeasuredSide, measure_sides
from moe_optimizer.measure.bench.samples import RoundSamples, read_samples
from moe_optimizer.measure.bench.schedule import Turn
from moe_optimizer.measure.bench.side import Side, read_start, start_path, starting
from moe_optimizer.measure.tune.goal import Goal, figures
from moe_optimizer.measure.tune.journal import Journal
from moe_optimizer.measure.tune.server_pool import ServerPool
from moe_optimizer.measure.tune.trial import STOCK, BudgetSpentError, Candidate, Hopeless, Outcome, Trial
from moe_optimizer.plan.json_codec import encode
from moe_optimizer.plan.plan import Plan

_WHERE_ONLY = ("--host", "--port")
"""Arguments that change neither speed nor answers."""
_CHANGE_ANSWERS = ("--quantization", "--kv-cache-dtype", "--dtype", "--moe-backend", "--compilation-config")
"""Arguments with which vLLM computes otherwise."""
_ONLY_WATCHES = ("expert_load",)
"""Passes of the plugin that compute nothing."""
_STOPPING_SHARE = 0.1
"""Chosen: of a budget, at most, to stop servers before any have shown how long that takes."""

Judge = Callable[[Side, Side, Path], Outcome]
"""Takes a plan, stock vLLM and a folder. The sides have the URLs of their servers where these are up."""
SideOf = Callable[[Candidate, int], Side]
"""Takes a candidate and the number of its side, which has a port of its own; raises where there is no such plan."""
OnStep = Callable[[float, str], None]


class _HopelessError(Exception):
    """The first repetitions of a trial were hopeless."""


class ServedMeasure:
    """A `Measure` whose servers run here.

    Args:
        side_of: makes the plan of a candidate, and the side of a benchmark that is served by it.
        template: what is sent; its sides, repetitions and folder are set for each measurement.
        goal: scores the repetitions.
        judge: compares answers with those of stock vLLM.
        journal: has the time that is left.
        on_step: takes the share of this run's time that is over, and what is done.
        top_logprobs: of a position, that `judge` asks for.
    """

    def __init__(
        self,
        *,
        side_of: SideOf,
        template: BenchRequest,
        goal: Goal,
        judge: Judge,
        journal: Journal,
        on_step: OnStep,
        top_logprobs: int,
    ) -> None:
        self._side_of, self._template, self._goal = side_of, template, goal
        self._judge, self._journal, self._on_step = judge, journal, on_step
        self._armed = False
        self._pool = ServerPool(top_logprobs=top_logprobs)
        self._asked = 0
        """Measurements so far."""
        self._plans: dict[Candidate, Plan | MoeOptimizerError] = {}

    def why_not(self, candidate: Candidate) -> str:
        """Return why there is no such plan here, "" if there is one."""
        found = self._planned(candidate)
        return str(found) if isinstance(found, MoeOptimizerError) else ""

    def identity(self, candidate: Candidate) -> str:
        """Return a text that is equal for candidates whose servers are alike."""
        plan = self.plan(candidate)
        shown = [(each.pass_name, each.value, encode(each.params)) for each in plan.plugin_decisions]
        group = None if plan.group is None else encode(plan.group)
        what = [plan.serve_args.without(*_WHERE_ONLY).words, sorted(plan.serve_env.items()), shown, group]
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]

    def on(self, candidate: Candidate) -> Set[str]:
        """Return the optimizations that are on in its plan."""
        return frozenset(each.pass_name for each in self.plan(candidate).decisions if each.is_optimization)

    def changes_answers(self, candidate: Candidate) -> bool:
        """Return whether our kernels compute, or vLLM is told another dtype, cache or kernel than it has by itself."""
        plan = self.plan(candidate)
        if any(each.pass_name not in _ONLY_WATCHES for each in plan.plugin_decisions):
            return True
        return any(plan.serve_args.value(flag) != plan.plain_args.value(flag) for flag in _CHANGE_ANSWERS)

    def plan(self, candidate: Candidate) -> Plan:
        """Return the plan of a candidate.

        Raises:
            MoeOptimizerError: there is none.
        """
        found = self._planned(candidate)
        if isinstance(found, MoeOptimizerError):
            raise found
        return found

    def _planned(self, candidate: Candidate) -> Plan | MoeOptimizerError:
        if candidate not in self._plans:
            try:
                self._plans[candidate] = planned(self._side_of(candidate, 0))
            except MoeOptimizerError as error:
                self._plans[candidate] = error
        return self._plans[candidate]

    def paired(self, ours: Candidate, theirs: Candidate) -> Outcome:
        """Measure two in turns, as `bench` does. What is up of an earlier measurement is not started again."""
        folder = self._template.folder / f"paired-{self.identity(ours)}-{self.identity(theirs)}"

        def measure() -> Outcome:
            sides, handling = self._servers(ours, theirs)
            request, before = self._request(folder, sides), len(self._pool.starts_s)
            measured = measure_sides(request, on_step=self._progress, handling=handling)
            first, second = (self._trial(each, request) for each in measured)
            starts_s = [] if handling.at_once else self._pool.starts_s[before:]
            return Outcome(ours=first, theirs=second, once_s=sum(starts_s) - max(starts_s, default=0.0))

        return self._within_budget(measure)

    def alone(self, candidate: Candidate, hopeless: Hopeless) -> Outcome:
        """Measure one, and end it after a repetition that is hopeless."""
        folder = self._template.folder / f"alone-{self.identity(candidate)}"

        def measure() -> Outcome:
            # Samples of a server that was stopped in the middle are of another start.
            shutil.rmtree(folder, ignore_errors=True)
            sides, handling = self._servers(candidate)
            request = self._request(folder, sides)

            def watch(share: float, text: str) -> None:
                self._progress(share, text)
                scores = [self._goal.score(each) for each in _repetitions(request)]
                if scores and len(scores) < request.repetitions and hopeless(scores):
                    raise _HopelessError

            try:
                (side,) = measure_sides(request, on_step=watch, handling=handling)
            except _HopelessError:
                scores = tuple(self._goal.score(each) for each in _repetitions(request))
                return Outcome(ours=Trial(scores=scores), pruned=True)
            return Outcome(ours=self._trial(side, request))

        return self._within_budget(measure)

    def judged(self, candidate: Candidate) -> Outcome:
        """Compare its answers with those of stock vLLM, as `quality` does."""
        folder = self._template.folder / f"judged-{self.identity(candidate)}"

        def measure() -> Outcome:
            sides, handling = self._servers(candidate, STOCK)
            with contextlib.ExitStack() as stack:
                if handling.stays:
                    begun = (
                        stack.enter_context(
                            handling.start(side, run_dir=folder / f"server-{number}", ready_timeout_s=self._timeout_s)
                        )
                        for number, side in enumerate(sides)
                    )
                    waits = tuple(begun) if handling.at_once else begun
                    sides = tuple(
                        dataclasses.replace(side, url=wait().base_url) for side, wait in zip(sides, waits, strict=True)
                    )
                return self._judge(sides[0], sides[1], folder)

        return self._within_budget(measure)

    def close(self) -> None:
        """Stop the servers that are up."""
        self._pool.close()

    @property
    def _timeout_s(self) -> float:
        return self._template.ready_timeout_s

    def _request(self, folder: Path, sides: tuple[Side, ...]) -> BenchRequest:
        # No prompt must be in the prefix cache of a server that was asked before.
        self._asked += 1
        return dataclasses.replace(self._template, sides=sides, folder=folder, asked_before=self._asked)

    def _servers(self, *candidates: Candidate) -> tuple[tuple[Side, ...], Handling]:
        """Return the sides of candidates, one or two, and how their servers are handled."""
        # vLLM measures how much of a GPU it takes by what becomes less there: nothing else may start meanwhile.
        at_once = not planned(self._side_of(candidates[0], 0)).num_gpus
        if not self._keeps(candidates):
            self._pool.close()
            sides = tuple(self._side_of(each, number) for number, each in enumerate(candidates))
            return sides, Handling(start=starting, at_once=at_once, stopping=self._stopping)
        keys = tuple(map(self.identity, candidates))
        slots = self._pool.slots_for(keys)
        sides = tuple(self._side_of(each, slot) for each, slot in zip(candidates, slots, strict=True))
        start = self._pool.start_of(sides, keys, slots)
        return sides, Handling(start=start, at_once=at_once, stays=True, stopping=self._stopping)

    def _keeps(self, candidates: tuple[Candidate, ...]) -> bool:
        """Return whether servers stay up: two fit beside each other, and none gets a prompt twice."""
        texts = self._template.texts
        sides = tuple(self._side_of(each, number) for number, each in enumerate((*candidates, STOCK)[:2]))
        beside = dataclasses.replace(self._template, sides=sides)
        return beside.side_by_side and not (texts is not None and texts.whole)

    def _trial(self, side: MeasuredSide, request: BenchRequest) -> Trial:
        repetitions = [[side.rounds[load][each] for load in request.loads] for each in range(request.repetitions)]
        return Trial(scores=tuple(map(self._goal.score, repetitions)), figures=figures(repetitions))

    def _progress(self, share: float, text: str) -> None:
        if not self._armed:
            self._arm()
        self._on_step(self._journal.share, f"{text} ({share:.0%})")

    def _within_budget(self, measure: Callable[[], Outcome]) -> Outcome:
        """Measure within what is left of the budget; a failure is a result."""
        before = signal.signal(signal.SIGALRM, _expire)
        try:
            self._arm()
            return measure()
        except MoeOptimizerError as error:
            return Outcome(failed=" ".join(str(error).split())[:300])
        finally:
            self._disarm()
            signal.signal(signal.SIGALRM, before)

    def _arm(self) -> None:
        """Raise `BudgetSpentError` once the budget is spent but for a stop of servers. Call this in the main thread."""
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self._journal.left_s - self._stopping_s()))
        self._armed = True

    def _disarm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._armed = False

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        """Let servers stop whose measurement is complete: cut off now, it would be lost. The next start arms again."""
        if self._armed:
            self._disarm()
        yield

    def _stopping_s(self) -> float:
        """Return what is kept of the budget to stop the servers of a measurement.

        It is as much as those took that took longest so far; before any did, what two may take until they are killed.
        """
        seen = [read_start(path).stop_s for path in self._template.folder.glob(f"*/{start_path(Path(), '*')}")]
        known = [each for each in (*seen, self._pool.slowest_stop_s) if each is not None]
        return max(known, default=min(2 * STOP_MARGIN_S, _STOPPING_SHARE * self._journal.budget_s))


def planned(side: Side) -> Plan:
    """Return the plan of a side that is served by one."""
    assert side.plan is not None, f"{side.name}: a candidate has a plan"
    return side.plan


def _repetitions(request: BenchRequest) -> list[list[RoundSamples]]:
    """Return the repetitions of the first side that are complete so far, in order."""
    found: list[list[RoundSamples]] = []
    for each in range(request.repetitions):
        paths = [request.samples_path(Turn(0, load, each)) for load in request.loads]
        if not all(path.exists() for path in paths):
            break
        found.append([read_samples(path) for path in paths])
    return found


def _expire(_number: int, _frame: FrameType | None) -> None:
    raise BudgetSpentError
