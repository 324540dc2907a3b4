"""What samples become: latencies, rates, goodput, verdicts; and what must never become a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import ExitCode, InputError, ServerFailedError
from moe_optimizer.measure.bench.result import Limits, load_result, verdicts
from moe_optimizer.measure.bench.samples import RoundSamples, check_samples, read_samples
from moe_optimizer.measure.bench.side import read_start
from moe_optimizer.measure.bench.trace import Load, TraceRequest

CLIENTS = Load(clients=2)


def samples(*, seconds: float = 2.0, tpot: float = 0.01, tokens: tuple[int, ...] = (11, 21), **changes) -> RoundSamples:
    first = tuple(0.1 + 0.1 * number for number in range(len(tokens)))
    made = RoundSamples(
        duration_s=seconds,
        ttft_s=first,
        e2e_s=tuple(start + tpot * (count - 1) for start, count in zip(first, tokens, strict=True)),
        itl_s=(tpot,) * (sum(tokens) - len(tokens)),
        input_tokens=(50,) * len(tokens),
        output_tokens=tokens,
        errors=("",) * len(tokens),
        energy_j=None,
    )
    return dataclasses.replace(made, **changes)


def test_times_and_rates_are_those_of_the_requests():
    found = load_result(CLIENTS, [samples(), samples(seconds=4.0), samples(seconds=3.0)], Limits())
    assert (found.clients, found.rate, found.rounds, found.completed) == (2, None, 3, 6)
    assert found.tpot_ms is not None
    assert found.tpot_ms.median == pytest.approx(10.0)
    assert found.ttft_ms.median == pytest.approx(150.0)
    assert found.e2e_ms.p99 == pytest.approx(400.0, rel=0.01)
    assert found.output_tokens_per_s == pytest.approx(32 / 3)
    assert found.total_tokens_per_s == pytest.approx(132 / 3)
    assert found.requests_per_s == pytest.approx(2 / 3)
    assert found.goodput_per_s is None
    assert found.joules_per_token is None


@pytest.mark.parametrize(
    ("limits", "good"), [(Limits(ttft_ms=150), 1), (Limits(tpot_ms=9), 0), (Limits(ttft_ms=250, tpot_ms=11), 2)]
)
def test_goodput_counts_requests_within_every_limit(limits: Limits, good: int):
    assert load_result(CLIENTS, [samples()], limits).goodput_per_s == pytest.approx(good / 2)


def test_a_completion_of_one_token_has_no_time_per_output_token():
    found = load_result(CLIENTS, [samples(tokens=(1, 1), itl_s=())], Limits(tpot_ms=1))
    assert found.tpot_ms is None
    assert found.itl_ms is None
    assert found.goodput_per_s == pytest.approx(1.0)


def test_energy_is_per_output_token_and_unknown_where_a_round_has_none():
    rounds = [samples(energy_j=64.0), samples(energy_j=32.0)]
    assert load_result(CLIENTS, rounds, Limits()).joules_per_token == pytest.approx(1.5)
    assert load_result(CLIENTS, [*rounds, samples()], Limits()).joules_per_token is None


def test_verdicts_name_metric_and_load_and_say_who_is_faster():
    ours = {CLIENTS: [samples(tpot=tpot, seconds=200 * tpot) for tpot in (0.010, 0.0101, 0.0099)]}
    theirs = {CLIENTS: [samples(tpot=tpot, seconds=200 * tpot) for tpot in (0.020, 0.0202, 0.0198)]}
    found = {each.metric: each for each in verdicts(ours, theirs)}
    assert set(found) == {"tpot_ms", "ttft_ms", "output_tokens_per_s"}
    assert (found["tpot_ms"].verdict, found["output_tokens_per_s"].verdict) == ("faster", "faster")
    assert found["tpot_ms"].ratio == pytest.approx(2.0, rel=0.01)
    assert found["ttft_ms"].verdict == "no difference shown"
    assert found["tpot_ms"].load == "2 clients"
    back = {each.metric: each for each in verdicts(theirs, ours)}
    assert back["tpot_ms"].verdict == "slower"


def test_a_round_without_time_between_tokens_gives_no_verdict_on_it():
    ours = {CLIENTS: [samples(tpot=tpot) for tpot in (0.010, 0.011)]}
    theirs = {CLIENTS: [samples(tpot=tpot) for tpot in (0.010, 0.0)]}
    assert {each.metric for each in verdicts(ours, theirs)} == {"ttft_ms", "output_tokens_per_s"}


ASKED = tuple(TraceRequest(0.0, 50, tokens, (1, 2, 3, 4)) for tokens in (11, 21))


def test_a_round_in_which_all_succeeded_passes():
    check_samples(samples(), ASKED, title="stock")


@pytest.mark.parametrize(
    "wrong",
    [
        samples(errors=("", "HTTP 500")),
        samples(tokens=(11, 0)),
        samples(tokens=(11, 20)),
        samples(tokens=(11,), ttft_s=(0.1,), e2e_s=(0.2,), input_tokens=(50,), errors=("",)),
    ],
    ids=["an error", "no tokens", "a token less", "a request without an answer"],
)
def test_a_failed_request_ends_the_benchmark(wrong: RoundSamples):
    with pytest.raises(ServerFailedError, match="stock") as error:
        check_samples(wrong, ASKED, title="stock")
    assert error.value.exit_code == ExitCode.SERVER_FAILED


def test_of_the_load_generators_traceback_only_what_happened_is_told() -> None:
    traceback = (
        "Traceback (most recent call last):\n" + 20 * "  File somewhere\n" + "aiohttp.ClientPayloadError: not all\n"
    )
    wrong = dataclasses.replace(samples(), errors=(traceback, *samples().errors[1:]))
    with pytest.raises(ServerFailedError, match=r"failed: aiohttp\.ClientPayloadError: not all$"):
        check_samples(wrong, ASKED, title="stock")


@pytest.mark.parametrize("read", [read_samples, read_start])
def test_a_file_of_a_cut_off_run_is_refused_with_its_name(read: Callable[[Path], Any], tmp_path: Path) -> None:
    """`--resume` reads them."""
    path = tmp_path / "cut.json"
    path.write_text('{"ttft_s": [')
    with pytest.raises(InputError, match=r"cut\.json"):
        read(path)
