"""Holds how long our expert kernels and vLLM's own take on one device, and chooses by the number of tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

STOCK = "stock"
"""What dispatch tables and proofs call vLLM's own kernel: the one that computes beside ours on the same weights."""
STOCK_BACKENDS = {"cuda": "triton", "cpu": "cpu"}
"""What vLLM calls that kernel among its MoE backends, on GPUs and on its CPU build."""
ANY_NUMBER = 1 << 30
"""Of tokens: more than any forward has."""
MARGIN = 0.02
"""Chosen: a kernel of ours is used where it takes at least 2 % less than vLLM's. Below that the order of two medians
changes from run to run (benchmarks/records)."""


_ROUNDS = re.compile("grouped-(fp8|mxfp4)([-/].*)?")


def rounds_activations(use: str) -> bool:
    """Return whether the kernel of this name quantises the activations to FP8; "grouped-mxfp4-n96" does."""
    return _ROUNDS.fullmatch(use) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The experts of one MoE layer as one device holds them."""

    hidden_size: int
    intermediate_size: int
    """Expert width on this device: after a tensor-parallel split."""
    num_experts: int
    """Experts on this device."""
    num_global_experts: int
    """Experts that the router chooses from; more than `num_experts` under expert parallelism."""
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpeeds:
    """One layer at one number of tokens: times in microseconds of one run, medians on a GPU, shortest on a CPU."""

    tokens: int
    stock_us: float
    ours_us: Mapping[str, float]
    """Kernel variant -> time. A variant that does not cover this many tokens is absent."""
    peers_us: Mapping[str, float] = field(default_factory=dict)
    """Another backend of vLLM, as --moe-backend names it -> time. One that had clearly lost before is absent."""
    even_us: Mapping[str, float] = field(default_factory=dict)
    """STOCK or a variant of ours -> time with all experts equally likely, where the times above are means over other
    routings too; {}: they are of that routing alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedQuestion:
    """What a plan asks of the tables: everything that the times of a layer depend on."""

    device: str
    """GPU as the driver names it; for a processor its name, instruction set and number of threads."""
    weights: str
    """How the weights are stored: "fp32", "bf16", "fp16", "fp8_block", "fp8_channel", "fp8_tensor", "mxfp4",
    "int4_g128", "int4_g128z" (with zero points)."""
    shape: LayerShape
    kernel_hash: str
    """Of the sources that our kernels for this device are built from."""
    vllm: str
    """Version whose kernel is "stock"."""
    driver: str = ""
    """Of the GPU; "" for a processor."""
    torch: str = ""
    triton: str = ""
    """"" where it was not recorded, or where there is none."""
    environment: str = ""
    """What changes the speed of vLLM's own kernel beside all that: its variables, the tuned configuration; "" where
    nothing is set."""

    def why_not(self, speeds: KernelSpeeds) -> str:
        """Return why a table does not answer this question, or ""; the first difference of the weightiest kind."""
        for name, what in (
            ("device", "are of"),
            ("shape", "are of a layer of"),
            ("weights", "are of weights in"),
            ("vllm", "are of vLLM"),
            ("kernel_hash", "are of kernels from other sources:"),
        ):
            mine, theirs = getattr(self, name), getattr(speeds, name)
            if mine != theirs:
                return f"{what} {_short(theirs)}, needed {_short(mine)}"
        if speeds.environment != self.environment:
            return f"are of {speeds.environment or 'no settings of vLLM'}, needed {self.environment or 'none'}"
        if not speeds.measured_here:
            return ""
        for name, what in (("driver", "driver"), ("torch", "torch"), ("triton", "Triton")):
            mine, theirs = getattr(self, name), getattr(speeds, name)
            if mine != theirs:
                return f"are of {what} {theirs or 'unknown'}, needed {mine or 'none'}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpeeds(SpeedQuestion):
    """The answer to one question."""

    rows: tuple[TokenSpeeds, ...]
    """Ascending in `tokens`."""
    source: str
    """The record, or when it was measured."""
    measured_here: bool = False
    """By this user, not shipped: then it holds for these versions of driver, torch and Triton only, since measuring
    again is easy."""
    unfinished: bool = False
    """The time ended before every number of tokens was measured that may matter."""
    disturbed: str = ""
    """What else kept the device busy meanwhile; "" where nothing was noticed."""
    backend: str = ""
    """The backend that vLLM itself takes for this layer; "" where it was not asked."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Another backend of vLLM -> why it does not compute this layer here, or could not be timed."""

    @property
    def is_final(self) -> bool:
        """Whether another measurement would bring nothing."""
        compared = bool(self.backend) or not self.measured_here
        return compared and not self.unfinished and not self.disturbed


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRange:
    """From the range before up to this many tokens, use this kernel."""

    up_to: int
    use: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTables:
    """The tables at hand."""

    tables: tuple[KernelSpeeds, ...] = ()
    warnings: tuple[str, ...] = field(default_factory=tuple)
    """Files that could not be read."""

    def find(self, question: SpeedQuestion) -> KernelSpeeds | None:
        """Return the last table that answers, a final one if there is any: what was measured on this machine comes
        after what is shipped.
        """
        fitting = [table for table in self.tables if not question.why_not(table)]
        final = [table for table in fitting if table.is_final]
        return (final or fitting or [None])[-1]

    def why_none(self, question: SpeedQuestion) -> str:
        """Return why no table answers, by the nearest one."""
        same_device = [table for table in self.tables if table.device == question.device]
        if not same_device:
            return f"no kernel speeds for {question.device}"
        same_shape = [table for table in same_device if table.shape == question.shape]
        if not same_shape:
            return f"no kernel speeds for a layer of {_short(question.shape)} on {question.device}"
        nearest = max(same_shape, key=lambda table: (table.weights == question.weights, table.vllm == question.vllm))
        return f"the kernel speeds {question.why_not(nearest)}"


def token_ranges(rows: Sequence[TokenSpeeds]) -> tuple[TokenRange, ...]:
    """Return which kernel to use for how many tokens. Above the last range: vLLM's.

    Between two measured numbers of tokens a variant is used only if it was measured at both and is faster than
    vLLM's at both: at the upper one, up to which it is used, by `MARGIN`; of several the one that gains most there. At
    the measured number itself, which may be the step that a server is told to fill, the fastest of all counts.
    """
    chosen: list[TokenRange] = []
    lower: TokenSpeeds | None = None
    for row in rows:
        # Below the first measured number there is nothing to compare with: one token is all it stands for.
        if lower is None and row.tokens > 1:
            chosen.append(TokenRange(up_to=row.tokens - 1, use=STOCK))
        if lower is not None and lower.tokens + 1 < row.tokens:
            chosen.append(TokenRange(up_to=row.tokens - 1, use=_winner(row, also_at=lower)))
        chosen.append(TokenRange(up_to=row.tokens, use=_winner(row)))
        lower = row
    merged: list[TokenRange] = []
    for each in chosen:
        if merged and merged[-1].use == each.use:
            merged.pop()
        merged.append(each)
    if merged and merged[-1].use == STOCK:
        merged.pop()
    return tuple(merged)


def fastest_ranges(rows: Sequence[TokenSpeeds]) -> tuple[TokenRange, ...]:
    """Return which kernel of ours to use for every number of tokens, where vLLM's cannot compute.

    Between two measured numbers it is the fastest at the upper one of those measured at both; above the last it is that
    of the last.
    """
    chosen: list[TokenRange] = []
    lower: TokenSpeeds | None = None
    for row in rows:
        both = row.ours_us if lower is None else {use: us for use, us in row.ours_us.items() if use in lower.ours_us}
        if row.tokens > 1 + (lower.tokens if lower is not None else 0):
            chosen.append(TokenRange(up_to=row.tokens - 1, use=_fastest(both or row.ours_us)))
        chosen.append(TokenRange(up_to=row.tokens, use=_fastest(row.ours_us)))
        lower = row
    chosen.append(TokenRange(up_to=ANY_NUMBER, use=chosen[-1].use))
    return tuple(each for each, after in zip(chosen, [*chosen[1:], None], strict=True)
                 if after is None or after.use != each.use)  # fmt: skip


def _fastest(times: Mapping[str, float]) -> str:
    return min(times, key=lambda use: times[use])


def _winner(row: TokenSpeeds, *, also_at: TokenSpeeds | None = None) -> str:
    faster = [
        (time, name)
        for name, time in row.ours_us.items()
        if time <= (1 - MARGIN) * row.stock_us
        and (also_at is None or also_at.ours_us.get(name, float("inf")) <= also_at.stock_us)
    ]
    return min(faster)[1] if faster else STOCK


def kernel_for(ranges: Sequence[TokenRange], tokens: int) -> str:
    """Return what to use for this many tokens."""
    for each in ranges:
        if tokens <= each.up_to:
            return each.use
    return STOCK


def never_slower(rows: Sequence[TokenSpeeds], variant: str) -> bool:
    """Return whether one kernel can take the place of vLLM's at every number of tokens: the weights of a layer lie
    for the one or for the other. "Never slower" is meant up to `MARGIN`, and it must gain somewhere.
    """
    ratios = [row.stock_us / row.ours_us[variant] for row in rows if variant in row.ours_us]
    return len(ratios) == len(rows) > 0 and min(ratios) >= 1 - MARGIN and max(ratios) >= 1 + MARGIN


def ours_never_slower(table: KernelSpeeds, *, rounded: bool = False) -> bool:
    """Return whether the fastest of our kernels can take the place of what vLLM computes a layer with, at every number
    of tokens: "never slower" as in `never_slower`.

    Args:
        table: of the layer.
        rounded: whether those count that round the activations.
    """
    ratios = []
    for row in table.rows:
        usable = [us for name, us in row.ours_us.items() if rounded or not rounds_activations(name)]
        own_choice = table.backend not in ("", *STOCK_BACKENDS.values())
        theirs = row.peers_us.get(table.backend, math.inf) if own_choice else row.stock_us
        ratios.append(theirs / min(usable) if usable else 0.0)
    compared = any(math.isfinite(each) for each in ratios)
    return compared and min(ratios) >= 1 - MARGIN and max(ratios) >= 1 + MARGIN


_HASH_DIGITS = 64
"""Of a SHA-256, of which a dozen tell two apart."""


def _short(value: object) -> str:
    if isinstance(value, LayerShape):
        experts = f"{value.num_experts}"
        if value.num_global_experts != value.num_experts:
            experts += f" of {value.num_global_experts}"
        return f"H={value.hidden_size}, I={value.intermediate_size}, {experts} experts, top-{value.top_k}"
    text = str(value)
    return text[:12] if len(text) == _HASH_DIGITS else text[:40]
