"""Runs a quality comparison: serves reference and plan one after the other, asks both the same, and judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_optimizer.measure.bench.pace import Pace
from moe_optimizer.measure.bench.side import Side
from moe_optimizer.measure.quality.distributions import Distributions
from moe_optimizer.measure.quality.divergence import Differences
from moe_optimizer.measure.quality.embedded import compute_reference
from moe_optimizer.measure.quality.judge import attainable, judge, judge_batch, judge_tasks, named
from moe_optimizer.measure.quality.kernels import Kernel, kernel_at, proofs_in
from moe_optimizer.measure.quality.metrics import batch_result, differences, is_flat, metrics
from moe_optimizer.measure.quality.probes import Probe, most_sequences, step_sizes
from moe_optimizer.measure.quality.request import EMBEDDED, QualityRequest
from moe_optimizer.measure.quality.result import (
    Continuations,
    Failure,
    FirstDifference,
    KernelResult,
    Metrics,
    PassResult,
    ProbeResult,
    PromptResult,
    QualityResult,
    first_difference,
)
from moe_optimizer.measure.quality.served import ServedSide, Texts, known_probes, parts, serve_side
from moe_optimizer.measure.quality.tasks import compare_tasks

OnStep = Callable[[float, str], None]
Found = list[tuple[Probe, Differences]]


def run_quality(request: QualityRequest, *, on_step: OnStep) -> QualityResult:
    """Compare a plan with its reference. What a stopped run has measured in the same folder is kept.

    Passes are measured alone where that is asked for, or where the plan fails and there is more than one to blame.

    Args:
        request: what to measure.
        on_step: takes the share that is done, and what comes next.

    Raises:
        InputError: the folder has other answers, or a server takes no requests of the needed length.
        RequiredNotAppliedError: an optimization of a plan did not run.
        ServerFailedError: a server died, or refused a request.
    """
    request.claim_folder()
    return _Run(request, on_step).result()


class _Run:
    """One run: the sides are served in turn."""

    def __init__(self, request: QualityRequest, on_step: OnStep) -> None:
        self._request = request
        self._on_step = on_step
        self._sizes = step_sizes(request.judged_plan)
        self._most = most_sequences(request.judged_plan)
        self._thresholds = request.thresholds
        self._pace = Pace(())
        self._expected: list[str] = []
        """Keys of sides that are to be served, as long as nobody knows what they are asked."""

    def result(self) -> QualityResult:
        """Measure and judge."""
        request = self._request
        layers: tuple[str, ...] = ()
        embedded = request.reference.name == EMBEDDED
        self._expect("plan", *([] if embedded else ["reference"]))
        if request.always_alone:
            self._expect(*map(_key_alone, request.alone))
        if embedded:
            self._pace.expect([EMBEDDED])
            plan, asked = self._serve(request.plan, "plan")
            reference, layers = self._embedded(plan, asked)
        else:
            reference, asked = self._serve(request.reference, "reference")
            plan, _ = self._serve(request.plan, "plan")
        found = _found(asked, reference, plan)
        proofs = proofs_in(plan.run_dir)
        kernels = {probe.tokens: kernel_at(request.judged_plan, proofs, probe.tokens) for probe in asked}
        probes = _probe_results(found, kernels)
        fields = metrics(found)
        batch = [
            each
            for side in ((plan,) if layers else (reference, plan))
            if (each := batch_result(side.name, asked, side.answers))
        ]
        thresholds = self._thresholds = attainable(request.thresholds, batch, reference.name)
        failed = judge(Metrics(**fields), "all", thresholds)
        failed += [failure for each in probes for failure in judge(each, each.probe, thresholds)]
        tasks = compare_tasks(reference.tasks, plan.tasks)
        failed += [*judge_batch(batch, plan.name, thresholds), *judge_tasks(tasks, thresholds)]
        blamed = len(request.alone) > 1
        alone, alone_failed = self._alone(asked, reference) if request.always_alone or (failed and blamed) else ([], [])
        return QualityResult(
            **fields,
            model=request.model,
            plan=plan.name,
            plan_digest=request.judged_plan.digest,
            reference=reference.name,
            passes=request.plan.passes,
            top_logprobs=request.top_logprobs,
            flat=is_flat(reference.answers),
            thresholds=thresholds,
            failed=tuple(named(failed, alone_failed, tuple(request.alone))),
            probes=tuple(probes),
            kernels=tuple(_kernel_results(found, kernels)),
            passes_alone=tuple(alone),
            not_alone=request.not_alone,
            batch=tuple(batch),
            first_difference=_first_difference(found, reference, plan, layers),
            prompts=_prompts(request.prompts, reference.texts, plan.texts),
            tasks=tasks,
            environment=request.environment,
        )

    def _expect(self, *keys: str) -> None:
        """Add sides to what is to do."""
        asked = known_probes(self._request, sizes=self._sizes, max_num_seqs=self._most)
        if asked is None:
            self._expected += keys
            self._pace.expect([Pace.START] * len(keys))
            return
        for key in keys:
            self._pace.expect(parts(self._request, key, asked))

    def _expect_probes(self, asked: tuple[Probe, ...]) -> None:
        for key in self._expected:
            self._pace.expect(each for each in parts(self._request, key, asked) if each != Pace.START)

    def _begin(self, kind: str, text: str) -> None:
        self._on_step(self._pace.begin(kind), text)

    def _serve(self, side: Side, key: str) -> tuple[ServedSide, tuple[Probe, ...]]:
        found = serve_side(
            self._request, side, key, sizes=self._sizes, max_num_seqs=self._most, begin=self._begin,
            on_probes=self._expect_probes,
        )  # fmt: skip
        self._pace.end()
        return found

    def _embedded(self, plan: ServedSide, asked: tuple[Probe, ...]) -> tuple[ServedSide, tuple[str, ...]]:
        folder = self._request.folder / "reference"
        folder.mkdir(exist_ok=True, mode=0o700)
        share = self._pace.begin(EMBEDDED)
        layers = compute_reference(
            self._request.model,
            asked,
            top_logprobs=self._request.top_logprobs,
            answers=plan.run_dir.parent,
            reference=folder,
            log=folder / "engine.log",
            on_step=lambda done, text: self._on_step(share + (1 - share) * done, text),
        )
        self._pace.end()
        answers = {probe.key: Distributions.read(folder / f"{probe.key}.npz") for probe in asked}
        return ServedSide(name=EMBEDDED, answers=answers, texts=None, tasks={}, run_dir=folder), layers

    def _alone(
        self, asked: Sequence[Probe], reference: ServedSide
    ) -> tuple[list[PassResult], list[tuple[str, list[Failure]]]]:
        if not self._request.always_alone:
            self._expect(*map(_key_alone, self._request.alone))
        self._request.make_room()
        results, failed = [], []
        for name, alone in self._request.alone.items():
            side, _ = self._serve(alone.side, _key_alone(name))
            found = _found(asked, reference, side)
            result = PassResult(**metrics(found), pass_name=name, with_passes=alone.with_passes, value=alone.value)
            results.append(result)
            failures = judge(result, "all", self._thresholds, pass_name=name)
            for probe, difference in found:
                one = Metrics(**metrics([(probe, difference)]))
                failures += judge(one, str(probe), self._thresholds, pass_name=name)
            batch = batch_result(side.name, asked, side.answers)
            failures += judge_batch([batch] if batch else [], side.name, self._thresholds, pass_name=name)
            tasks = compare_tasks(reference.tasks, side.tasks)
            failures += judge_tasks(tasks, self._thresholds, pass_name=name)
            # A pass that runs only with another fails by that one if the other fails too.
            if not any(other in alone.with_passes for other, earlier in failed if earlier):
                failed.append((name, failures))
        return results, failed


def _key_alone(pass_name: str) -> str:
    return f"alone-{pass_name}"


def _found(asked: Sequence[Probe], reference: ServedSide, plan: ServedSide) -> Found:
    return [(probe, differences(probe, reference.answers[probe.key], plan.answers[probe.key])) for probe in asked]


def _probe_results(found: Found, kernels: Mapping[int, Kernel]) -> list[ProbeResult]:
    return [
        ProbeResult(
            **metrics([(probe, difference)]),
            probe=str(probe),
            kind=probe.kind,
            tokens=probe.tokens,
            prompts=len(probe.prompts),
            kernel=kernels[probe.tokens].name,
        )
        for probe, difference in found
    ]


def _kernel_results(found: Found, kernels: Mapping[int, Kernel]) -> list[KernelResult]:
    computed: dict[Kernel, Found] = {}
    for probe, difference in found:
        computed.setdefault(kernels[probe.tokens], []).append((probe, difference))
    return [
        KernelResult(
            **metrics(probed),
            kernel=kernel.name,
            dtype=kernel.dtype,
            backend=kernel.backend,
            tokens=tuple(sorted({probe.tokens for probe, _ in probed})),
        )
        for kernel, probed in sorted(computed.items(), key=lambda each: str(each[0]))
    ]


def _first_difference(
    found: Found, reference: ServedSide, plan: ServedSide, layers: tuple[str, ...]
) -> FirstDifference | None:
    """Return where the first of the generated texts leaves the reference, in the smallest batch."""
    for probe, difference in found:
        for prompt, same in enumerate(difference.matches):
            mine = plan.answers[probe.key].at(plan.answers[probe.key].sequences == prompt)
            theirs = reference.answers[probe.key].at(reference.answers[probe.key].sequences == prompt)
            if same < min(len(mine), len(theirs)):
                return FirstDifference(
                    prompt=prompt,
                    place=int(same),
                    reference_token=int(theirs.next_ids[same]),
                    plan_token=int(mine.next_ids[same]),
                    layers=layers,
                )
    return None


def _prompts(prompts: tuple[str, ...], reference: Texts | None, plan: Texts | None) -> tuple[PromptResult, ...]:
    if reference is None or plan is None:
        return ()
    return tuple(
        PromptResult(
            prompt=prompt,
            in_batch=Continuations(**_both(reference.in_batch[number], plan.in_batch[number]))
            if len(prompts) > 1
            else None,
            **_both(reference.alone[number], plan.alone[number]),
        )
        for number, prompt in enumerate(prompts)
    )


def _both(reference: str, plan: str) -> dict[str, Any]:
    return {"reference": reference, "plan": plan, "first_difference": first_difference(reference, plan)}
