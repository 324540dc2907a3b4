"""Whole quality runs between servers that are stand-ins."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.measure.bench.side import RunningSide, Side, ask
from moe_optimizer.measure.quality import served
from moe_optimizer.measure.quality.collect import Asked, answered
from moe_optimizer.measure.quality.distributions import Distributions
from moe_optimizer.measure.quality.probes import Extent, Probe
from moe_optimizer.measure.quality.request import Alone, QualityRequest
from moe_optimizer.measure.quality.result import Continuations, QualityResult
from moe_optimizer.measure.quality.run import run_quality
from moe_optimizer.measure.quality.table import render
from moe_optimizer.plan.json_codec import encode
from tests.builders import cpu_machine, made_plan, tiny_moe
from tests.unit.measure.paper_server import PaperServer, Row, paper_server, right

LIMITS = {"kl_mean": 0.001, "kl_p99": 0.01, "top1_agreement": 0.97, "perplexity_ratio": 1.01, "batch_kl_mean": None}


@dataclasses.dataclass
class Pair:
    reference: PaperServer
    ours: PaperServer
    request: QualityRequest

    def run(self, **changes: Any) -> QualityResult:
        return run_quality(dataclasses.replace(self.request, **changes), on_step=lambda share, text: None)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    plan = made_plan(tiny_moe(), cpu_machine())
    with paper_server() as reference, paper_server() as ours:
        yield Pair(
            reference,
            ours,
            QualityRequest(
                plan=Side(name="ours", plan=plan, url=ours.base_url),
                reference=Side(name="stock", plan=None, url=reference.base_url),
                alone={}, not_alone={}, always_alone=False, texts=("a text of some length " * 40,),
                extent=Extent(positions=600, generated=8), top_logprobs=10, thresholds=LIMITS, model="paper",
                folder=tmp_path / "run", ready_timeout_s=1.0,
            ),
        )  # fmt: skip


def shifted(last: int, batch: int) -> Row:
    weights = [math.exp(value) * (1 + 0.3 * (token % 2)) for token, value in enumerate(right(last, batch))]
    return [math.log(each / sum(weights)) for each in weights]


def broken_in_batches(last: int, batch: int) -> Row:
    return shifted(last, batch) if batch > 8 else right(last, batch)


def no_number_in_batches(last: int, batch: int) -> Row:
    return [math.nan] * 10 if batch == 8 else right(last, batch)


def test_a_reference_that_finds_all_tokens_as_likely_is_said_to_say_little(pair: Pair) -> None:
    assert not pair.run().flat
    pair.reference.row = pair.ours.row = lambda last, batch: [-math.log(10) + 0.01 * token for token in range(10)]
    found = pair.run(folder=pair.request.folder / "flat")
    assert (found.failed, found.flat) == ((), True)
    assert "as likely" in render(found)


def test_a_server_against_its_like_shows_nothing(pair: Pair) -> None:
    found = pair.run()
    assert found.failed == ()
    assert found.kl_mean.value == pytest.approx(0, abs=1e-9)
    assert found.top1_agreement.value == 1
    assert found.greedy_match_tokens is not None
    assert found.greedy_match_tokens.value == 8


def test_a_divergence_is_what_the_two_distributions_have(pair: Pair) -> None:
    pair.ours.row = shifted
    found = pair.run()
    rows = [(right(last, 1), shifted(last, 1)) for last in range(10)]
    exact = [sum(math.exp(p) * (p - q) for p, q in zip(*each, strict=True)) for each in rows]
    assert found.kl_mean.value is not None
    assert min(exact) - 1e-9 <= found.kl_mean.value <= max(exact) + 1e-9
    assert "kl_mean" in {each.metric for each in found.failed}


def test_what_is_wrong_only_in_large_batches_is_found_there(pair: Pair) -> None:
    pair.ours.row = broken_in_batches
    found = pair.run()
    assert {each.where for each in found.failed if each.metric == "kl_mean"} >= {"decode, 64 at once"}
    assert not any(each.where in ("decode, 1 at once", "decode, 8 at once") for each in found.failed)
    ours = next(each for each in found.batch if each.side == "ours")
    assert ours.kl_mean.value is not None
    assert ours.kl_mean.value > 0.001


def test_the_batch_is_judged_where_it_is_asked_for(pair: Pair) -> None:
    pair.ours.row = broken_in_batches
    assert pair.run(thresholds={}).failed == ()
    judged = pair.run(thresholds={"batch_kl_mean": 0.001})
    assert [each.where for each in judged.failed] == ["batch"]
    pair.reference.row = broken_in_batches
    assert pair.run(thresholds={"batch_kl_mean": 0.001}, folder=pair.request.folder.with_name("both")).failed == ()


def test_a_server_without_numbers_fails_and_its_result_has_a_json_form(pair: Pair) -> None:
    pair.ours.row = no_number_in_batches
    found = pair.run()
    assert found.not_numbers > 0
    assert "decode, 8 at once" in {each.where for each in found.failed}
    assert "no number" in render(found)
    assert encode(found)["kl_mean"] == {"value": None, "low": None, "high": None}


def test_a_run_goes_on_from_what_was_answered(pair: Pair) -> None:
    first = pair.run()
    asked = pair.reference.asked
    next((pair.request.folder / "plan").glob("decode-8.npz")).unlink()
    pair.ours.asked = 0
    assert pair.run() == first
    assert pair.reference.asked == asked
    assert pair.ours.asked == 1


def test_answers_of_another_run_are_not_taken(pair: Pair) -> None:
    pair.run()
    with pytest.raises(InputError, match="--run-dir"):
        pair.run(texts=("another text",))


def test_the_pass_that_fails_alone_is_named_and_the_other_is_not(pair: Pair) -> None:
    pair.ours.row = shifted
    seen: list[int] = []
    assert pair.request.plan.plan is not None
    with paper_server() as good:
        alone = {
            name: Alone(side=Side(name=name, plan=pair.request.plan.plan, url=url), with_passes=(), value="")
            for name, url in (("scheduler", good.base_url), ("fp8", pair.ours.base_url))
        }
        found = pair.run(alone=alone, make_room=lambda: seen.append(good.asked))
    # Once, before any pass is asked.
    assert seen == [0]
    assert {each.pass_name for each in found.failed} == {"fp8"}
    assert [each.pass_name for each in found.passes_alone] == ["scheduler", "fp8"]
    assert max(map(len, render(found).splitlines())) <= 80


def test_the_share_that_is_over_is_by_what_starts_and_probes_took(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start takes 100 s, a probe 2 s."""
    now, seen = [0.0], []

    @contextlib.contextmanager
    def opened(side: Side, **how: Any) -> Iterator[RunningSide]:
        now[0] += 100.0
        assert side.url is not None
        yield ask(side.url)

    def answer(path: Path, asked: Asked, probe: Probe) -> Distributions:
        now[0] += 2.0
        return answered(path, asked, probe)

    monkeypatch.setattr(served, "opened", opened)
    monkeypatch.setattr(served, "answered", answer)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    run_quality(pair.request, on_step=lambda share, text: seen.append((share, now[0])))
    # Before a probe is over, nothing is known of the others.
    assert [share < 0.02 for share, _ in seen[:2]] == [True, True]
    assert [share for share, _ in seen[2:]] == [pytest.approx(at / now[0]) for _, at in seen[2:]]
    # What an earlier run answered takes no time of this one.
    next((pair.request.folder / "plan").glob("*.npz")).unlink()
    shares: list[float] = []
    run_quality(pair.request, on_step=lambda share, text: shares.append(share))
    assert len(shares) == 2


def test_passes_are_not_measured_alone_where_nothing_fails(pair: Pair) -> None:
    nobody = Alone(side=Side(name="x", plan=None, url="http://127.0.0.1:9"), with_passes=(), value="")
    assert pair.run(alone={"x": nobody, "y": nobody}).passes_alone == ()


def test_the_pass_whose_task_drops_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(*_: Any, base_url: str, path: Path, **__: Any) -> None:
        right = base_url != pair.ours.base_url
        path.write_text(json.dumps({"mmlu acc": {str(number): float(right or number > 9) for number in range(99)}}))

    monkeypatch.setattr("moe_optimizer.measure.quality.served.answer_tasks", answers)
    assert pair.request.plan.plan is not None
    with paper_server() as good:
        alone = {
            name: Alone(side=Side(name=name, plan=pair.request.plan.plan, url=url), with_passes=(), value="")
            for name, url in (("scheduler", good.base_url), ("fp8", pair.ours.base_url))
        }
        found = pair.run(alone=alone, tasks=("mmlu",), thresholds=LIMITS | {"task_drop": 0.01})
    assert [(each.pass_name, each.where, each.metric) for each in found.failed] == [("fp8", "mmlu acc", "task_drop")]
    assert max(map(len, render(found).splitlines())) <= 80


def continues(prompts: list[str], *, changed_in_batch: bool) -> list[str]:
    return [f"{each} and {'off' if changed_in_batch and len(prompts) > 1 else 'on'}" for each in prompts]


def test_outputs_stand_side_by_side_alone_and_in_a_batch(pair: Pair) -> None:
    pair.ours.continued = lambda prompts: continues(prompts, changed_in_batch=True)
    result = pair.run(prompts=("so", "or"))
    first = result.prompts[0]
    assert (first.reference, first.plan, first.first_difference) == ("so and on", "so and on", None)
    assert first.in_batch == Continuations(reference="so and on", plan="so and off", first_difference=8)
    shown = render(result)
    assert "stock, all prompts in one request: the same text" in shown
    assert "ours         so and o>>f<<f" in shown


def test_a_prompt_that_is_the_only_one_has_no_batch(pair: Pair) -> None:
    (prompt,) = pair.run(prompts=("so",)).prompts
    assert (prompt.plan, prompt.first_difference, prompt.in_batch) == ("so and on", None, None)


def test_a_prompt_that_a_server_refuses_is_bad_input(pair: Pair) -> None:
    def refused(prompts: list[str]) -> list[str]:
        raise ValueError

    pair.ours.continued = refused
    with pytest.raises(InputError, match="--prompts: ours answers 400"):
        pair.run(prompts=("so",))
