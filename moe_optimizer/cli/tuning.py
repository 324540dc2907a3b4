"""Carries out a tuning: plans of candidates, what is sent to them, the search, and the files it leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from moe_optimizer.cli import judgement, messages, quality
from moe_optimizer.cli.bench import traffic_of
from moe_optimizer.cli.candidate_plans import CandidatePlans
from moe_optimizer.cli.measuring_options import DEFAULT_WORKLOAD, QualityOptions, TuneOptions
from moe_optimizer.cli.options import DEFAULT_READY_TIMEOUT_S, PlanOptions
from moe_optimizer.cli.progress import ProgressLines, progress_bar
from moe_optimizer.cli.run_folder import run_folder
from moe_optimizer.cli.tune_triton import check_left_to_triton, tune_triton
from moe_optimizer.errors import InputError, MoeOptimizerError, ServerFailedError
from moe_optimizer.files import make_private_folder, read_json, write_atomically
from moe_optimizer.measure.bench.request import BenchRequest
from moe_optimizer.measure.bench.run import environment_of
from moe_optimizer.measure.bench.side import Side
from moe_optimizer.measure.bench.texts import NO_DRAFTS
from moe_optimizer.measure.claimed_folder import is_claimed, make_run_folder
from moe_optimizer.measure.expected_gains import expected_gain
from moe_optimizer.measure.quality.run import run_quality
from moe_optimizer.measure.quality.table import SAYS_LITTLE
from moe_optimizer.measure.tune.goal import parse_goal
from moe_optimizer.measure.tune.journal import Journal
from moe_optimizer.measure.tune.ledger import NOTHING_COMPARED, Entry, TuneResult
from moe_optimizer.measure.tune.question import PlannedPass, Question
from moe_optimizer.measure.tune.search import Found, search
from moe_optimizer.measure.tune.served import ServedMeasure, planned
from moe_optimizer.measure.tune.settings import settings_of
from moe_optimizer.measure.tune.step_budget import TRITON_SHARE
from moe_optimizer.measure.tune.trial import PLAN, STOCK, Candidate, Outcome
from moe_optimizer.passes.registry import needed_by
from moe_optimizer.plan.decision import Applier, Status, Wish
from moe_optimizer.plan.json_codec import decode, encode
from moe_optimizer.plan.plan import Plan
from moe_optimizer.profiles.schema import Quality

_DEFAULT_GOAL = "throughput"
_DEFAULT_BUDGET_S = 1200.0
_DEFAULT_REPETITIONS = 4
_TRITON_FILE = "triton.json"
_PLAN_FILE = "plan.json"
_LEDGER_FILE = "ledger.json"
_MEASURED = "measured"
"""The folder of the measurements."""
_QUALITY_TOKENS = 2048
"""Chosen: a quarter of what `quality` compares by default, in a quarter of its time."""
_JUDGED_BY_TEXT = ("speculation",)
"""Passes whose gain hangs on what a model says."""
_BY_SETTINGS = ("kv_cache",)
"""Passes whose values are tried as settings of vLLM."""
_CLIENTS_OF_A_CORE = 2
"""Chosen."""
_MAX_BYTES = 1 << 16


class Tuning:
    """One run of the command: its folder, its plans, and the search."""

    def __init__(self, options: TuneOptions, lines: ProgressLines) -> None:
        self._begin = time.monotonic()
        self._options, self._lines = options, lines
        self._goal = parse_goal(options.goal or _DEFAULT_GOAL)
        self.folder = run_folder(options.run_dir, "tune", resume=options.resume)
        self._budget_s = options.budget or _DEFAULT_BUDGET_S
        self._template = self._traffic()
        if self._goal.limits.tpot_ms is not None and not self._template.has_token_times:
            raise InputError(
                f"--goal: got {self._goal.text!r:.80}, but {self._template.workload_name} asks for no two tokens",
                hint="choose another --workload, or leave tpot out",
            )
        self._entries: list[Entry] = []
        self._close: Callable[[], None] = lambda: None
        """Stops the servers that are up."""

    def result(self) -> TuneResult:
        """Search, write plan and ledger, and return the ledger.

        Raises:
            ServerFailedError: nothing could be measured.
        """
        with messages.held_messages(verbose=self._options.verbose):
            plans = self._plans()
            plan = plans.plan(PLAN)
        if not plan.num_gpus and (self._options.tokens or self._options.folder):
            raise InputError(
                "--tokens and --folder: are of the Triton kernel, which runs on GPUs", hint="leave them out"
            )
        make_run_folder(self.folder)
        if plan.num_gpus:
            self._tune_triton(plan)
            plans = self._plans()
            plan = plans.plan(PLAN)
        template, question = self._sent_to(plan), self._question(plan, plans)
        journal = self._journal(plans, template, question)
        self._lines.release()

        with progress_bar("tune", lines=self._lines, folder=self.folder, share=lambda: journal.share) as show:
            measure = ServedMeasure(
                side_of=plans.side,
                template=template,
                goal=self._goal,
                judge=self._judge,
                journal=journal,
                on_step=show,
                top_logprobs=_top_logprobs(plan),
            )
            self._close = measure.close
            with contextlib.closing(measure):
                found = search(question, measure, journal, show)
        result = self._written(found, plans, journal)
        if found.why_nothing and found.ended == "done":
            raise ServerFailedError(
                f"tune: no server could be measured, not stock vLLM's either: {found.why_nothing}",
                hint=f"{self.folder / _LEDGER_FILE} has what was tried",
            )
        return result

    def _plans(self) -> CandidatePlans:
        # A run that goes on has the plans of the one that was stopped: what is measured now would change them.
        calibrate = not is_claimed(self.folder / _MEASURED, command="tune")
        return CandidatePlans(
            self._options, self._lines, run_dir=self.folder, fits=self._template.check_fits, calibrate=calibrate
        )

    def _journal(self, plans: CandidatePlans, template: BenchRequest, question: Question) -> Journal:
        workload = template.workload.model_dump() if template.workload else encode(template.trace)
        served = [plans.side(each, 0).served for each in (PLAN, STOCK)]
        identity = [self._goal.text, served, workload, template.repetitions, question.seed, dict(question.settings)]
        before_s = time.monotonic() - self._begin
        return Journal(self.folder / _MEASURED, budget_s=self._budget_s, identity=identity, before_s=before_s)

    def _tune_triton(self, plan: Plan) -> None:
        """Tune vLLM's Triton kernel where the plan leaves it something, unless an earlier run in the folder did."""
        path = self.folder / _TRITON_FILE
        if path.exists():
            entry = decode(Entry, read_json(path, max_bytes=_MAX_BYTES), origin=str(path))
        else:
            begin = time.monotonic()
            kept, reason = False, ""
            try:
                check_left_to_triton(plan)
                written = tune_triton(self._options, budget_s=TRITON_SHARE * self._budget_s).result["file"]
                kept, reason = written is not None, f"written: {written}" if written else "nothing beat vLLM's own"
            except MoeOptimizerError as error:
                reason = str(error)
            what = "launch parameters of vLLM's Triton MoE kernel"
            took = time.monotonic() - begin
            entry = Entry(step="triton", what=what, against="", kept=kept, reason=reason, seconds=took)
            write_atomically(path, json.dumps(encode(entry)))
        self._entries.append(entry)

    def _written(self, found: Found, plans: CandidatePlans, journal: Journal) -> TuneResult:
        """Write the ledger and the plan; no plan where nothing was compared, since somebody would take it for one."""
        plan = plans.plan(found.candidate)
        path = self.folder / _PLAN_FILE
        if found.compared:
            write_atomically(path, plan.to_json() + "\n")
        result = TuneResult(
            goal=self._goal.text,
            metric=self._goal.metric,
            met=found.met,
            nearest_miss=found.nearest_miss,
            plan=str(found.candidate) if found.compared else NOTHING_COMPARED,
            plan_file=str(path) if found.compared else None,
            plan_digest=plan.digest if found.compared else None,
            passes=() if found.candidate.stock else Side(name="tuned", plan=plan).passes,
            arguments=dict(found.candidate.arguments),
            ended=found.ended,
            budget_s=self._budget_s,
            spent_s=journal.spent_s,
            entries=(*self._entries, *found.entries),
            environment={**environment_of(plan), "model": self._options.model_name},
            command=("moe-optimizer", *sys.argv[1:]),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_atomically(self.folder / _LEDGER_FILE, json.dumps(encode(result), indent=2) + "\n")
        return result

    def _traffic(self) -> BenchRequest:
        options = self._options
        workload, trace = traffic_of(options)
        return BenchRequest(
            command=("moe-optimizer", *sys.argv[1:]),
            sides=(),
            workload_name=options.workload,
            workload=workload,
            trace=trace,
            repetitions=options.repetitions or _DEFAULT_REPETITIONS,
            limits=self._goal.limits,
            folder=self.folder / _MEASURED,
            tokenizer=options.model_name,
            trust_remote_code=options.trust_remote_code,
            ready_timeout_s=options.ready_timeout or DEFAULT_READY_TIMEOUT_S,
        )

    def _sent_to(self, plan: Plan) -> BenchRequest:
        """Return what is sent to every candidate: by default one load, of as many clients as the plan is made for.

        On a CPU, where nobody named a batch size, of a few for each core: the profile's would take a budget for one
        measurement.
        """
        options, workload = self._options, self._template.workload
        is_default = options.workload == DEFAULT_WORKLOAD and not options.clients and not options.rates
        if workload is None or not is_default:
            return self._template
        clients = plan.workload.batch_size
        named = options.batch_size is not None or "--max-num-seqs" in options.vllm_args.values
        if not (named or plan.num_gpus) and plan.hardware.cpu is not None:
            clients = min(clients, _CLIENTS_OF_A_CORE * plan.hardware.cpu.cores)
        load = {"clients": (clients,), "rates": ()}
        return dataclasses.replace(self._template, workload=workload.model_copy(update=load))

    def _question(self, plan: Plan, plans: CandidatePlans) -> Question:
        with_text = self._template.texts is not None
        return Question(
            goal=self._goal,
            passes=(*planned_passes(plan, with_text=with_text), *_offered(plan, plans, with_text=with_text)),
            settings=settings_of(plan, self._options.vllm_args.values),
            seed=self._options.seed,
        )

    def _judge(self, ours: Side, stock: Side, folder: Path) -> Outcome:
        """Compare a plan's answers with stock vLLM's."""
        make_private_folder(folder)
        options = self._options
        same = {field.name: getattr(options, field.name) for field in dataclasses.fields(PlanOptions) if field.init}
        asked = QualityOptions(
            **same | {"run_dir": str(folder / "quality"), "tokens": _QUALITY_TOKENS},
            ready_timeout=options.ready_timeout,
            calibrate=options.calibrate,
        )
        sides = (dataclasses.replace(ours, name="candidate"), stock)
        plan = planned(ours)
        request = dataclasses.replace(
            quality.request_of(asked, self._lines, sides),
            # Also of servers that are up: they were started so.
            top_logprobs=_top_logprobs(plan),
            # A GPU that two servers share has no room for a third.
            make_room=self._close if plan.num_gpus else lambda: None,
        )
        found = run_quality(request, on_step=lambda share, text: self._lines.line(f"{share:4.0%}  quality: {text}"))
        judgement.keep(request.judged_plan, found)
        blamed = {each.pass_name for each in found.failed} & {each.pass_name for each in plan.decisions}
        return Outcome(
            failed_metrics=tuple(sorted({each.metric for each in found.failed})),
            blamed=tuple(sorted(blamed)),
            doubt=SAYS_LITTLE if found.flat else "",
        )


def _top_logprobs(plan: Plan) -> int:
    """Return of how many tokens of a position the quality gate asks for the probability."""
    return Quality.model_validate_json(json.dumps(plan.profile.get("quality", {}))).top_logprobs


def planned_passes(plan: Plan, *, with_text: bool) -> tuple[PlannedPass, ...]:
    """Return the passes that are on, change something and are not required, with those that cannot run without them.

    Args:
        plan: that has them.
        with_text: whether the requests are text.
    """
    on = {each.pass_name: each for each in plan.decisions if each.is_optimization}
    device = "cuda" if plan.num_gpus else "cpu"
    return tuple(
        PlannedPass(
            name=name,
            with_passes=tuple(other for other in on if other != name and name in needed_by(other, device)),
            expected=expected_gain(decision),
            why_unjudged="" if with_text or name not in _JUDGED_BY_TEXT else NO_DRAFTS,
        )
        for name, decision in on.items()
        if not decision.required
    )


def _offered(plan: Plan, plans: CandidatePlans, *, with_text: bool) -> Iterator[PlannedPass]:
    """Yield the passes that the planner left off by itself, though they can be on here; what somebody switched off is.

    Args:
        plan: that leaves them off.
        plans: makes the plan with each.
        with_text: whether the requests are text.
    """
    for each in plan.decisions:
        if each.status is not Status.OFF or each.wish is not Wish.AUTO:
            continue
        if each.pass_name in _BY_SETTINGS or (each.pass_name in _JUDGED_BY_TEXT and not with_text):
            continue
        with contextlib.suppress(MoeOptimizerError):
            decision = plans.plan(Candidate(on=frozenset({each.pass_name}))).decision(each.pass_name)
            if decision.is_optimization and decision.applier is not Applier.SERVERS:
                yield PlannedPass(name=each.pass_name, is_on=False, expected=expected_gain(decision))
