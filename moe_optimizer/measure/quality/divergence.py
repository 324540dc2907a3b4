"""Compares two servers' next-token distributions position by position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_optimizer.measure.quality.distributions import ABSENT, Distributions

_LEAST_MASS = 1e-6
"""Of the bucket of all other tokens: log-probabilities come as float32, whose sum is known no better."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Differences:
    """What two servers say at the same positions of the same texts."""

    kl: NDArray[np.float64]
    """[P] nats; infinite where a server gave something that is no number."""
    top1: NDArray[np.bool_]
    """[P], whether both find the same token likeliest."""
    logprob_loss: NDArray[np.float64]
    """[P], how much likelier the reference finds the token that follows."""
    sequences: NDArray[np.int32]
    """[P], ascending: which prompt."""
    matches: NDArray[np.int64]
    """For each prompt, how many tokens both chose alike before the first difference; empty for texts that are given."""


def compare(reference: Distributions, other: Distributions) -> Differences:
    """Compare two servers on a text that both were given.

    Raises:
        ValueError: they were given different texts.
    """
    if not np.array_equal(reference.next_ids, other.next_ids):
        raise ValueError("the servers were given different texts")
    return _differences(reference, other, matches=np.empty(0, dtype=np.int64))


def compare_generated(reference: Distributions, other: Distributions) -> Differences:
    """Compare two servers on what each generated from the same prompts.

    Of each prompt the positions up to the first token that differs count, that one included: behind it the two
    continue different texts.
    """
    places_of_reference, places_of_other, matches = [], [], []
    for sequence in np.unique(reference.sequences):
        mine = np.flatnonzero(reference.sequences == sequence)
        theirs = np.flatnonzero(other.sequences == sequence)
        shorter = min(len(mine), len(theirs))
        differs = np.flatnonzero(reference.next_ids[mine[:shorter]] != other.next_ids[theirs[:shorter]])
        same = int(differs[0]) if len(differs) else shorter
        matches.append(same)
        counted = min(same + 1, shorter)
        places_of_reference.append(mine[:counted])
        places_of_other.append(theirs[:counted])
    return _differences(
        reference.at(np.concatenate(places_of_reference)),
        other.at(np.concatenate(places_of_other)),
        matches=np.array(matches, dtype=np.int64),
    )


def _differences(reference: Distributions, other: Distributions, *, matches: NDArray[np.int64]) -> Differences:
    loss = reference.next_logprobs - other.next_logprobs
    return Differences(
        kl=divergences(reference, other),
        top1=_same_best(reference, other),
        logprob_loss=np.where(np.isfinite(loss), loss, np.inf),
        sequences=reference.sequences,
        matches=matches,
    )


def divergences(reference: Distributions, other: Distributions) -> NDArray[np.float64]:
    """Return KL(reference || other) of each position in nats, as far as it is known: a lower bound.

    The tokens whose probability both servers tell are compared one by one, all others as one bucket. Putting outcomes
    together never raises a divergence (data processing inequality), and with the whole vocabulary it is exact. A token
    that the other server does not tell is at most as likely there as the last one that it does, which is counted too.
    """
    found = np.empty(len(reference))
    for row in range(len(reference)):
        found[row] = _divergence(
            reference.token_ids[row], reference.logprobs[row], other.token_ids[row], other.logprobs[row]
        )
    return found


def _divergence(
    ids: NDArray[np.int32], logprobs: NDArray[np.float64], other_ids: NDArray[np.int32], others: NDArray[np.float64]
) -> float:
    if np.isnan(logprobs).any() or np.isnan(others).any():
        return np.inf
    told, other_told = ids != ABSENT, other_ids != ABSENT
    ids, logprobs, other_ids, others = ids[told], logprobs[told], other_ids[other_told], others[other_told]
    _, mine, theirs = np.intersect1d(ids, other_ids, return_indices=True)
    p_log, q_log = logprobs[mine], others[theirs]
    p, q = np.exp(p_log), np.exp(q_log)
    mine_alone = np.exp(np.delete(logprobs, mine))
    # The last one told may be the text's own token, told however unlikely it is: the one before bounds the others.
    most = np.exp(np.partition(others, 1)[1]) if len(others) > 1 else 1.0
    total = float(np.sum(p * (p_log - q_log))) + _rest(1.0 - p.sum(), 1.0 - q.sum(), mine_alone, most)
    # Sums of float32 that are not quite 1 may leave a few 1e-7 below zero.
    return max(total, 0.0)


def _rest(p_rest: float, q_rest: float, p_alone: NDArray[np.float64], most: float) -> float:
    """Return the least that the tokens that not both servers tell can add to a divergence.

    Args:
        p_rest: the reference's mass on them.
        q_rest: the other server's.
        p_alone: the reference's probabilities of those that it tells.
        most: the most that the other server can give to one of these.
    """
    total = 0.0
    for p in sorted(p_alone, reverse=True):
        # Mass in proportion to the reference's costs least; where that is more than there can be, the most costs least.
        if p * q_rest <= most * p_rest:
            break
        total += p * np.log(p / most)
        p_rest, q_rest = p_rest - p, q_rest - most
    p_rest, q_rest = max(p_rest, _LEAST_MASS), max(q_rest, _LEAST_MASS)
    return total + p_rest * float(np.log(p_rest / q_rest))


def _same_best(reference: Distributions, other: Distributions) -> NDArray[np.bool_]:
    """Return where the likeliest token is the same; where the reference has several, any of them will do."""
    best = other.token_ids[np.arange(len(other)), np.argmax(_ordered(other), axis=1)]
    likeliest = _ordered(reference).max(axis=1, keepdims=True)
    among = (_ordered(reference) == likeliest) & (reference.token_ids == best[:, None])
    numbers = ~np.isnan(reference.logprobs).any(axis=1) & ~np.isnan(other.logprobs).any(axis=1)
    return among.any(axis=1) & numbers


def _ordered(values: Distributions) -> NDArray[np.float64]:
    return np.nan_to_num(values.logprobs, nan=-np.inf, neginf=-np.inf)
