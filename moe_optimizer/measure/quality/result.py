"""Defines what `moe-optimizer quality --json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_optimizer.measure.quality.intervals import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """How far two servers' next-token distributions are apart; intervals are a bootstrap over prompts (95 %)."""

    positions: int
    """Distributions that were compared."""
    not_numbers: int
    """Positions at which a server gave something that is no number; then divergences are null."""
    kl_mean: Estimate
    """Nats a token, KL(reference || plan); a lower bound, see `QualityResult.top_logprobs`."""
    kl_p99: Estimate
    top1_agreement: Estimate
    """Share of positions at which both find the same token likeliest."""
    perplexity_ratio: Estimate | None
    """The plan's over the reference's on the given text; None where texts were generated."""
    greedy_match_tokens: Estimate | None
    """Generated tokens that are the same before the first difference; None where nothing was generated."""
    generated: int | None
    """Tokens generated from each prompt: the most that `greedy_match_tokens` can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult(Metrics):
    """Metrics at one number of tokens in a step."""

    probe: str
    kind: str
    tokens: int
    """In one step."""
    prompts: int
    kernel: str
    """That the plan has for so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResult(Metrics):
    """Metrics of all probes that one kernel computed."""

    kernel: str
    dtype: str
    """Of the experts' weights."""
    backend: str
    """Whose kernel: "moe_optimizer cpu", "moe_optimizer cuda" or "vllm"."""
    tokens: tuple[int, ...]
    """In the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult(Metrics):
    """Metrics of one pass alone against the reference."""

    pass_name: str
    with_passes: tuple[str, ...]
    """Those that it cannot run without."""
    value: str
    """What was decided about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """One server against itself: prompts alone, and the same prompts in the largest batch."""

    side: str
    tokens: int
    """Sequences in the batch."""
    kl_mean: Estimate
    greedy_match_tokens: Estimate
    generated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A threshold that was not kept."""

    pass_name: str
    """The pass that fails alone; "plan" where none does, or several together."""
    where: str
    """The probe, "all", "batch", or the task and its metric."""
    metric: str
    value: float | None
    """None: no number came out."""
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuations:
    """What both servers make of a prompt."""

    reference: str
    plan: str
    first_difference: int | None
    """Characters before it; None: the texts are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult(Continuations):
    """One of the user's prompts, sent alone."""

    prompt: str
    in_batch: Continuations | None
    """The same prompt in one request with all others; None where there is no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """A task of lm-evaluation-harness, answered by both servers, compared question by question."""

    task: str
    """Or the group of tasks that was asked for, with the questions of all of them."""
    metric: str
    questions: int
    reference: float
    plan: float
    difference: Estimate
    """Plan minus reference, paired."""
    only_reference: int
    """Questions that only the reference answers right."""
    only_plan: int
    p_value: float
    """McNemar's exact test: how likely such a difference is by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first generated token at which the plan's server leaves the reference."""

    prompt: int
    place: int
    reference_token: int
    plan_token: int
    layers: tuple[str, ...]
    """Kinds of layers, the likeliest causes first; empty where the reference is a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityResult(Metrics):
    """What was found of a plan; the metrics are over all probes."""

    model: str
    plan: str
    plan_digest: str
    reference: str
    passes: tuple[str, ...]
    """Those that are on, and proven to run."""
    top_logprobs: int
    """Tokens of each distribution that are compared one by one; all others are compared as one, so that a divergence
    is a lower bound."""
    flat: bool = False
    """Whether the reference finds the best tokens of most positions about as likely, as with random weights: that the
    plan agrees says little."""
    thresholds: Mapping[str, float | None]
    """As judged: `kl_mean` and `batch_kl_mean` are raised to twice that of the reference alone and in a batch, where
    that is more."""
    failed: tuple[Failure, ...]
    probes: tuple[ProbeResult, ...]
    kernels: tuple[KernelResult, ...]
    passes_alone: tuple[PassResult, ...]
    not_alone: Mapping[str, str]
    """Passes that were not measured alone, and why."""
    batch: tuple[BatchResult, ...]
    """Each server against itself; only the plan's is judged."""
    first_difference: FirstDifference | None
    prompts: tuple[PromptResult, ...]
    tasks: tuple[TaskResult, ...]
    environment: Mapping[str, str]


def first_difference(one: str, other: str) -> int | None:
    """Return how many characters precede the first that differs; None: the texts are the same."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))
