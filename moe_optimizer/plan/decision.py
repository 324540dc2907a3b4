"""One decision of a plan: what, why, on what evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from moe_optimizer.plan.serve_args import NO_ARGUMENTS, ServeArguments
from moe_optimizer.specs.quantity import Quantity

FORMAT_PARAM = "weight_format"
"""Key in `Decision.params` of a pass that has the plugin convert the experts; its value names a weight format."""


class Wish(Enum):
    """What the profile or a flag asks of a pass."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Status(Enum):
    """What the planner decided about a pass."""

    ON = "on"
    """Will be applied."""
    OFF = "off"
    """Not wanted, or not worth it here; the reason says which."""
    REFUSED = "refused"
    """Wanted, but this model, machine or vLLM cannot do it."""


class Applier(Enum):
    """Which part carries the decision out."""

    FLAGS = "flags"
    """Arguments of `vllm serve` (in `Decision.vllm_args`), or its variables (`Decision.env`)."""
    PLUGIN = "plugin"
    """The plugin inside vLLM's processes; must appear in their proof files."""
    FILES = "files"
    """Files and environment variables prepared before the start."""
    SERVERS = "servers"
    """Several servers and their router, started by the launcher (`Plan.group`)."""
    NONE = "none"
    """Nothing to carry out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a decision is expected to bring, against stock vLLM."""

    metric: str
    """For example "expert weight read time per decode step"."""
    ratio: Quantity
    """Stock divided by optimized for times and bytes, optimized divided by stock for rates: above 1 is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one pass decided.

    `params` are the pass's own settings for its applier, JSON values only.
    """

    pass_name: str
    wish: Wish
    wish_origin: str
    """Who asked: "flag --enable-fp8", "environment ...", "profile balanced" or "default"."""
    status: Status
    value: str
    """The decision in a few words, for example "TP=2" or "cpu kernel, bf16 weights"."""
    reason: str
    applier: Applier
    evidence: tuple[str, ...] = ()
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Alternative -> why not."""
    gain: Gain | None = None
    """None: nothing is claimed."""
    required: bool = False
    """True: the server must not count as started when this did not run (exit code 6)."""
    vllm_args: ServeArguments = NO_ARGUMENTS
    env: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    limits: str = ""
    """Where the pass ends: what it does not cover or what it may cost."""
    warnings: tuple[str, ...] = ()
