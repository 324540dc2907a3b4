"""Computes metrics from the differences between two servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_optimizer.launcher.decode_check import FLAT, TOP
from moe_optimizer.measure.quality.distributions import Distributions
from moe_optimizer.measure.quality.divergence import Differences, compare, compare_generated
from moe_optimizer.measure.quality.intervals import Estimate, estimate, exp_mean, mean, p99
from moe_optimizer.measure.quality.probes import Probe
from moe_optimizer.measure.quality.result import BatchResult

Answers = Mapping[str, Distributions]
"""By the probe's key."""


def differences(probe: Probe, reference: Distributions, plan: Distributions) -> Differences:
    """Return the differences between two servers' answers to one probe."""
    return (compare_generated if probe.generated else compare)(reference, plan)


def metrics(found: Sequence[tuple[Probe, Differences]]) -> dict[str, Any]:
    """Return the fields of Metrics over some probes together."""
    kl = np.concatenate([each.kl for _, each in found])
    sequences = _numbered([each.sequences for _, each in found])
    given = [each for probe, each in found if not probe.generated]
    generated = [each for probe, each in found if probe.kind == "decode"]
    # Of generated texts the position of the first difference is always among the counted: their share says little.
    fair = given + [each for probe, each in found if probe.kind == "long prefill"]
    agreeing = fair or [each for _, each in found]
    matches = np.concatenate([each.matches for each in generated]) if generated else None
    return {
        "positions": len(kl),
        "not_numbers": int(np.isinf(kl).sum()),
        "kl_mean": estimate(kl, sequences, mean),
        "kl_p99": estimate(kl, sequences, p99),
        "top1_agreement": estimate(
            np.concatenate([each.top1 for each in agreeing]).astype(float),
            _numbered([each.sequences for each in agreeing]),
            mean,
        ),
        "perplexity_ratio": _perplexity(given),
        "greedy_match_tokens": None if matches is None else _matched(matches),
        "generated": max((probe.generated for probe, _ in found if probe.kind == "decode"), default=None),
    }


def _perplexity(given: Sequence[Differences]) -> Estimate | None:
    if not given:
        return None
    loss = np.concatenate([each.logprob_loss for each in given])
    return estimate(loss, _numbered([each.sequences for each in given]), exp_mean)


def _matched(matches: np.ndarray[Any, Any]) -> Estimate:
    return estimate(matches.astype(float), np.arange(len(matches), dtype=np.int32), mean)


def _numbered(sequences: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the numbers of prompts of several probes, one after the other without a number twice."""
    start, found = 0, []
    for each in sequences:
        found.append(each + start)
        start += int(each.max(initial=0)) + 1
    return np.concatenate(found)


def batch_result(side: str, probes: Sequence[Probe], answers: Answers) -> BatchResult | None:
    """Compare what a server gives for prompts alone with what it gives for them in the largest batch."""
    decode = [probe for probe in probes if probe.kind == "decode"]
    alone, batch = decode[0], decode[-1]
    if alone.together or alone is batch:
        return None
    shared = min(len(alone.prompts), len(batch.prompts))
    found = compare_generated(answers[alone.key].of_sequences(shared), answers[batch.key].of_sequences(shared))
    return BatchResult(
        side=side,
        tokens=batch.tokens,
        kl_mean=estimate(found.kl, found.sequences, mean),
        greedy_match_tokens=_matched(found.matches),
        generated=alone.generated,
    )


def is_flat(answers: Answers) -> bool:
    """Return whether the best tokens of most positions are about as likely, as those of random weights are."""
    spreads = []
    for found in answers.values():
        best = -np.sort(-found.logprobs, axis=1)[:, :TOP]
        spreads.append(best[:, 0] - np.where(np.isneginf(best), np.inf, best).min(axis=1))
    return bool(np.median(np.concatenate(spreads)) < FLAT)
