"""Metrics of the experts' kernels: which computes how many tokens, its calls, what fell back and why, FP8 saturation.

All of it is in the proofs and the plan, which are read when the page is asked for: a forward pass does nothing for it.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.plan.plan import PLAN_FILE, Plan
from moe_optimizer.proof.record import LayerProof, PassProof, Proof
from moe_optimizer.specs.kernel_speeds import STOCK
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS

_PREFIX = "moe_optimizer"
_MOST_REASONS = 8
"""Chosen: of one page; a layer's name in a reason must not make a series for each layer."""
_REASON_CHARACTERS = 120
_OTHERS = "others"
_NONE = "none"


def kernel_metrics(run_dir: Path, proofs: Sequence[Proof]) -> Iterator[Metric]:
    """Yield what all workers say together; nothing before one has written its proof."""
    if not proofs:
        return
    name = proofs[0].served_model_name
    experts = [proof.passes[EXPERTS_PASS] for proof in proofs if EXPERTS_PASS in proof.passes]
    yield _ranges(name, _planned_ranges(run_dir, proofs[0].plan_digest), experts)
    yield _calls(name, experts)
    yield _fallbacks(name, proofs)
    yield from _saturation(name, proofs)
    yield from _cache_saturation(name, proofs)


@functools.lru_cache(maxsize=4)
def _planned_ranges(run_dir: Path, plan_digest: str) -> tuple[tuple[str, str, str], ...]:  # noqa: ARG001 - of the cache
    """Return weights, tokens and kernel of each range that the plan has; none where one kernel computes all."""
    path = run_dir / PLAN_FILE
    decision = Plan.load(path).decision(EXPERTS_PASS) if path.is_file() else None
    if decision is None or not isinstance(decision.params, FlashDmoeParams):
        return ()
    found = []
    for weights, ranges in decision.params.dispatch.items():
        for before, each in itertools.pairwise([None, *ranges]):
            assert each is not None, "only the first has none before it"
            found.append((weights, f"{before.up_to + 1 if before else 1}-{each.up_to}", each.use))
        if ranges and ranges[-1].use != STOCK:
            found.append((weights, f"{ranges[-1].up_to + 1}+", STOCK))
    return tuple(found)


def _ranges(model: str, planned: Sequence[tuple[str, str, str]], experts: Sequence[PassProof]) -> Metric:
    metric = GaugeMetricFamily(
        f"{_PREFIX}_kernel_range",
        "Which kernel computes the experts of a step of so many tokens; always 1.",
        labels=("model_name", "weights", "tokens", "kernel"),
    )
    found = sorted({
        label for each in experts for layer in each.layers for label in _computed_by(layer, each.kernel, planned)
    }, key=lambda label: (label[0], int(label[1].rstrip("+").partition("-")[0])))  # fmt: skip
    for labels in found:
        metric.add_metric((model, *labels), 1)
    return metric


def _computed_by(
    layer: LayerProof, kernel: str, planned: Sequence[tuple[str, str, str]]
) -> Sequence[tuple[str, str, str]]:
    """Return weights, tokens and kernel of each range of a layer, by how its weights are stored.

    The plan may name other weights: those of a layer that the plan or a wrong kernel keeps as vLLM loaded them.
    """
    if not planned:
        return ((layer.stored, "1+", kernel),) if kernel else ()
    # FP8 has a name for each of its scales there.
    ranges = [each for each in planned if each[0] == layer.stored or each[0].startswith(f"{layer.stored}_")]
    return ranges or ((layer.stored, "1+", STOCK),)


def _calls(model: str, experts: Sequence[PassProof]) -> Metric:
    metric = CounterMetricFamily(
        f"{_PREFIX}_kernel_calls",
        "Runs of a kernel for a layer, all layers and workers together; replays of a CUDA graph are not counted.",
        labels=("model_name", "kernel"),
    )
    calls: Counter[str] = Counter()
    for each in experts:
        for layer in each.layers:
            calls.update(layer.calls_by_kernel or {each.kernel: layer.calls})
    for kernel, count in sorted(calls.items()):
        metric.add_metric((model, kernel), count)
    return metric


def _fallbacks(model: str, proofs: Sequence[Proof]) -> Metric:
    metric = GaugeMetricFamily(
        f"{_PREFIX}_fallbacks",
        "Layers that stay as vLLM has them, or workers in which a pass is not applied, by reason.",
        labels=("model_name", "pass", "reason"),
    )
    counts: Counter[tuple[str, str]] = Counter()
    for proof in proofs:
        for name, each in proof.passes.items():
            reasons = [layer.why_plain for layer in each.layers if layer.why_plain]
            counts.update((name, reason[:_REASON_CHARACTERS]) for reason in (*reasons, each.why_not) if reason)
    shown = dict(counts.most_common(_MOST_REASONS))
    for (name, reason), count in shown.items():
        metric.add_metric((model, name, reason), count)
    rest = Counter({name: 0 for proof in proofs for name in proof.passes})
    for (name, _), count in counts.items() - shown.items():
        rest[name] += count
    for name, count in rest.items():
        # Also without any: a panel that shows nothing may be broken.
        metric.add_metric((model, name, _OTHERS if count else _NONE), count)
    return metric


def _saturation(model: str, proofs: Sequence[Proof]) -> Iterator[Metric]:
    """Yield the mean over the converted layers; 0 without FP8, and nothing where vLLM has converted."""
    layers = [layer for proof in proofs for layer in _fp8_layers(proof)]
    known = [layer for layer in layers if layer.saturated is not None]
    if known or not any("fp8" in proof.passes for proof in proofs):
        metric = GaugeMetricFamily(
            f"{_PREFIX}_fp8_saturated_weights_ratio",
            "Share of the FP8 weights whose magnitude is the largest that FP8 has, as they were converted.",
            labels=("model_name",),
        )
        weights = sum(layer.num_weights for layer in known)
        saturated = sum((layer.saturated or 0.0) * layer.num_weights for layer in known)
        metric.add_metric((model,), saturated / weights if weights else 0.0)
        yield metric


def _fp8_layers(proof: Proof) -> Sequence[LayerProof]:
    return proof.passes["fp8"].layers if "fp8" in proof.passes else ()


def _cache_saturation(model: str, proofs: Sequence[Proof]) -> Iterator[Metric]:
    """Yield both counts, 0 without a cache in FP8: a panel that shows nothing may be broken."""
    known = [proof.cache_saturation for proof in proofs if proof.cache_saturation is not None]
    for name, what, count in (
        ("sampled", "Numbers", sum(each.values for each in known)),
        ("saturated", "Numbers whose magnitude is the largest that FP8 has", sum(each.saturated for each in known)),
    ):
        metric = CounterMetricFamily(
            f"{_PREFIX}_fp8_cache_{name}_values",
            f"{what} in samples of the FP8 cache, all layers and workers together.",
            labels=("model_name",),
        )
        metric.add_metric((model,), count)
        yield metric
