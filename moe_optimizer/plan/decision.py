"""Defines one decision of a plan: what, why, on what evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from moe_optimizer.errors import InputError
from moe_optimizer.plan.pass_params import PARAMS_OF, FourBitParams, Fp8Params, PassParams, Sparsity24Params
from moe_optimizer.plan.serve_args import NO_ARGUMENTS, ServeArguments
from moe_optimizer.specs.quantity import Quantity

UNJUDGED = "no quality gate has judged it"
"""What a reason says of a changed output, until `moe-optimizer quality` has judged the plan."""

_Params = TypeVar("_Params", bound=PassParams)


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
    PENDING = "pending"
    """A measurement at the start will decide; no server is started with such a plan."""


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
    """What one pass decided."""

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
    no_gain: str = ""
    """Why none is modelled, of a pass that is on without one."""
    required: bool = False
    """True: the server must not count as started when this did not run (exit code 6)."""
    vllm_args: ServeArguments = NO_ARGUMENTS
    env: Mapping[str, str] = field(default_factory=dict)
    params: PassParams | None = None
    """For whoever carries it out and for later passes; None: there is nothing to know."""
    limits: str = ""
    """Where the pass ends: what it does not cover or what it may cost."""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kind = PARAMS_OF.get(self.pass_name)
        if self.params is not None and type(self.params) is not kind:
            expected = (
                f"{kind.__name__} of pass {self.pass_name}" if kind else f"none, as pass {self.pass_name} has none"
            )
            raise InputError(f"params: got {type(self.params).__name__}, expected {expected}")

    def params_as(self, kind: type[_Params]) -> _Params:
        """Return the params, which are of this kind."""
        assert isinstance(self.params, kind), f"{self.pass_name}: {self.params}, expected {kind.__name__}"
        return self.params

    @property
    def is_optimization(self) -> bool:
        """Whether it is carried out and could be off: how devices share the model is a setting, also of stock vLLM."""
        return self.status is Status.ON and self.applier is not Applier.NONE and self.pass_name != "parallelism"

    @property
    def weight_format(self) -> str | None:
        """The plugin's format that the experts are converted to; None: the plugin does not convert them."""
        return (
            self.params.weight_format if isinstance(self.params, (Fp8Params, FourBitParams, Sparsity24Params)) else None
        )
