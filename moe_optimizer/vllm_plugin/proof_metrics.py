"""Metrics of what the workers' proofs say: versions, passes, compilations; and of their steps and restarts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from moe_optimizer import env
from moe_optimizer.proof.record import UNFINISHED_METRIC, PassProof, Proof
from moe_optimizer.proof.step_count import AGE_METRIC, read_steps, worker_name

_PREFIX = "moe_optimizer"
_STATES = ("not_applied", "applied", "ran")
"""In the order in which a pass reaches them."""


def proof_metrics(run_dir: Path, proofs: Sequence[Proof]) -> Iterator[Metric]:
    """Yield what all workers say together; nothing before one has written its proof."""
    if proofs:
        yield _build_info(proofs[0])
        yield _restarts(proofs[0])
        yield _pass_states(proofs)
        yield _compilations(proofs)
        yield from _progress(run_dir, proofs)


def _restarts(proof: Proof) -> Metric:
    counter = CounterMetricFamily(
        f"{_PREFIX}_restarts", "Times the launcher started this server again.", labels=("model_name",)
    )
    counter.add_metric((proof.served_model_name,), float(os.environ.get(env.RESTARTS, "0")))
    return counter


def _progress(run_dir: Path, proofs: Sequence[Proof]) -> Iterator[Metric]:
    labels = ("model_name", "rank")
    steps = CounterMetricFamily(f"{_PREFIX}_steps", "Steps that a worker has begun: its heartbeat.", labels=labels)
    age = GaugeMetricFamily(
        AGE_METRIC,
        f"Seconds since a worker's last step began; while {UNFINISHED_METRIC} is not 0, it should stay small.",
        labels=labels,
    )
    now, workers = time.time(), {worker_name(proof): proof for proof in proofs}
    for each in read_steps(run_dir):
        if (proof := workers.get(each.worker)) is not None:
            names = (proof.served_model_name, str(proof.model_rank))
            steps.add_metric(names, each.count)
            age.add_metric(names, max(0.0, now - each.last_at))
    yield steps
    yield age


def _build_info(proof: Proof) -> Metric:
    names = ("moe_optimizer", "vllm", "torch")
    info = GaugeMetricFamily(
        f"{_PREFIX}_build_info",
        "Versions in the workers, and the plan; always 1.",
        labels=("model_name", *names, "plan"),
    )
    versions = (proof.versions.get(name, "") for name in names)
    info.add_metric((proof.served_model_name, *versions, proof.plan_digest), 1)
    return info


def _pass_states(proofs: Sequence[Proof]) -> Metric:
    """Return 1 for the state that every worker has reached for a pass, and 0 for the other states."""
    states = GaugeMetricFamily(
        f"{_PREFIX}_pass_state",
        "What became of a pass, in the worker where least of it did: 1 for that state.",
        labels=("model_name", "pass", "state"),
    )
    for name in sorted({name for proof in proofs for name in proof.passes}):
        reached = min(_reached(proof.passes.get(name)) for proof in proofs)
        for number, state in enumerate(_STATES):
            states.add_metric((proofs[0].served_model_name, name, state), float(number == reached))
    return states


def _reached(proof: PassProof | None) -> int:
    if proof is None or not proof.applied:
        return 0
    return 2 if proof.ran else 1


def _compilations(proofs: Sequence[Proof]) -> Metric:
    counts = CounterMetricFamily(
        f"{_PREFIX}_compilations",
        "Kernels and graphs that a worker compiled; after ready a request waited.",
        labels=("model_name", "rank", "when"),
    )
    for proof in proofs:
        if proof.compilations is not None:
            labels = (proof.served_model_name, str(proof.model_rank))
            counts.add_metric((*labels, "before_ready"), proof.compilations.before_ready)
            counts.add_metric((*labels, "after_ready"), proof.compilations.after_ready)
    return counts
