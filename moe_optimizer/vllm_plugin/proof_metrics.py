"""Shows on the /metrics page of vLLM's API server what the workers' proofs say: versions, passes, compilations.

Series have vLLM's own `model_name`, so that they join with its metrics.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from prometheus_client import REGISTRY, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from moe_optimizer.errors import InputError
from moe_optimizer.proof.record import PassProof, Proof, read_proofs
from moe_optimizer.proof.verdict import model_holders

_PREFIX = "moe_optimizer"
_STATES = ("not_applied", "applied", "ran")
"""In the order in which a pass reaches them."""
_shown: set[Path] = set()


def show_proofs(run_dir: Path) -> None:
    """Add what the proofs in `run_dir` say to this process's metrics. Harmless when repeated."""
    # With several API servers vLLM makes the page of files that they share, without collectors.
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ and run_dir not in _shown:
        _shown.add(run_dir)
        REGISTRY.register(ProofCollector(run_dir))


class ProofCollector(Collector):
    """Reads the workers' proofs when the page is asked for."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def describe(self) -> list[Metric]:
        """Return nothing: there are no counts yet when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield what all workers say together; nothing before one has written its proof."""
        try:
            proofs = model_holders(read_proofs(self._run_dir))
        except InputError:
            return
        if proofs:
            yield _build_info(proofs[0])
            yield _pass_states(proofs)
            yield _compilations(proofs)


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
