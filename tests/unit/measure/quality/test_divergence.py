"""Divergences whose value is known in closed form, and what holds for all."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.measure.quality.distributions import Distributions, distributions
from moe_optimizer.measure.quality.divergence import compare, compare_generated, divergences

_WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6)


def of(*rows: list[float], top: int = 6, following: int = 0) -> Distributions:
    """Positions with these probabilities of the tokens 0, 1, 2 ...; each tells its likeliest tokens."""
    found = []
    for number, row in enumerate(rows):
        total = sum(row)
        known = sorted(range(len(row)), key=lambda token: -row[token])[:top]
        logprobs = {token: math.log(row[token] / total) for token in {*known, following}}
        found.append((logprobs, following, number))
    return distributions(found)


def exact(p: list[float], q: list[float]) -> float:
    p, q = ([value / sum(each) for value in each] for each in (p, q))
    return sum(mine * math.log(mine / other) for mine, other in zip(p, q, strict=True))


def test_with_the_whole_vocabulary_it_is_the_divergence() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    assert divergences(of(p), of(q))[0] == pytest.approx(0.25 * math.log(2))


def test_of_two_gaussian_like_distributions_it_is_the_closed_form() -> None:
    # Of geometric distributions KL = log(a / b) + (1 - a) / a * log((1 - a) / (1 - b)), up to a tail of 1e-9.
    a, b = 0.5, 0.4
    p, q = ([x * (1 - x) ** k for k in range(60)] for x in (a, b))
    found = divergences(of(p, top=60), of(q, top=60))[0]
    assert found == pytest.approx(math.log(a / b) + (1 - a) / a * math.log((1 - a) / (1 - b)), rel=1e-4)


@given(_WEIGHTS, _WEIGHTS, st.integers(1, 5))
def test_fewer_tokens_never_say_more(p: list[float], q: list[float], top: int) -> None:
    found = divergences(of(p, top=top), of(q, top=top))[0]
    assert 0 <= found <= exact(p, q) + 1e-5


def test_a_likely_token_that_the_other_server_does_not_tell_counts() -> None:
    p, q = [0.9, 0.04, 0.03, 0.01, 0.01, 0.01], [0.01, 0.04, 0.01, 0.9, 0.03, 0.01]
    found = divergences(of(p, top=3, following=1), of(q, top=3, following=1))[0]
    assert 1.0 < found <= exact(p, q)


@given(_WEIGHTS, st.integers(1, 6))
def test_a_distribution_is_not_apart_from_itself(p: list[float], top: int) -> None:
    assert divergences(of(p, top=top), of(p, top=top))[0] == pytest.approx(0, abs=1e-9)


def test_what_is_no_number_is_infinitely_far_and_no_agreement() -> None:
    right = of([0.5, 0.5, 0.1])
    wrong = distributions([({0: math.nan}, 0, 0)])
    for pair in ((right, wrong), (wrong, right)):
        found = compare(*pair)
        assert found.kl[0] == math.inf
        assert not found.top1[0]
        assert found.logprob_loss[0] == math.inf


def test_two_texts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different texts"):
        compare(of([0.5, 0.5]), of([0.5, 0.5], following=1))


def test_any_of_equally_likely_tokens_is_the_same_choice() -> None:
    tie, one, other = [0.4, 0.4, 0.2], [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    assert compare(of(tie), of(one)).top1[0]
    assert compare(of(tie), of([0.3, 0.5, 0.2])).top1[0]
    assert not compare(of(tie), of(other)).top1[0]


def generated(*tokens: list[int]) -> Distributions:
    others = {97: math.log(0.05), 98: math.log(0.03), 99: math.log(0.01)}
    rows = [({each: math.log(0.9), **others}, each, n) for n, text in enumerate(tokens) for each in text]
    return distributions(rows)


def test_generated_texts_count_up_to_the_first_token_that_differs() -> None:
    found = compare_generated(generated([1, 2, 3, 4], [5, 6, 7, 8]), generated([1, 2, 9, 4], [5, 6, 7, 8]))
    assert found.matches.tolist() == [2, 4]
    assert found.sequences.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert np.flatnonzero(found.kl > 0.1).tolist() == [2]


def test_a_server_that_stops_early_is_compared_as_far_as_it_came() -> None:
    found = compare_generated(generated([1, 2, 3]), distributions([({0: math.nan}, 0, 0)]))
    assert found.matches.tolist() == [0]
    assert found.kl.tolist() == [math.inf]


def test_a_loss_of_log_probability_is_the_logarithm_of_the_ratio_of_perplexities() -> None:
    found = compare(of([0.5, 0.5], [0.8, 0.2]), of([0.4, 0.6], [0.4, 0.6]))
    assert np.exp(found.logprob_loss.mean()) == pytest.approx(math.sqrt(0.5 / 0.4 * 0.8 / 0.4))


def test_files_keep_every_number(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("answers") / "one.npz"
    before = distributions([({3: -0.25, 4: math.nan}, 3, 0), ({7: -1.5}, 7, 1)])
    before.write(path)
    after = Distributions.read(path)
    for name in ("token_ids", "logprobs", "next_ids", "next_logprobs", "sequences"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
