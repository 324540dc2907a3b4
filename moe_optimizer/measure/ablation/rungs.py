"""The rungs from a naive loop up, and what is found on each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Arguments = Mapping[str, str | bool | int]
NAIVE: Arguments = {
    "kv_cache": False, "continuous_batching": False, "gpu_sampler": False, "max_num_seqs": 1,
    "fused_moe": False, "attention_backend": "sdpa_padded", "enforce_eager": True, "compile_layers": False,
    "enable_prefix_caching": False, "enable_chunked_prefill": False, "async_scheduling": False,
}  # fmt: skip
"""Arguments of the engine on the first rung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimization:
    """One rung."""

    name: str
    added: Arguments = field(default_factory=dict)
    """To the arguments of the engine."""
    rounds: bool = False
    """Whether it may change rounding, and with it a token."""
    needs_gpu: bool = False


OPTIMIZATIONS = (
    Optimization(name="naive loop"),
    Optimization(name="kv_cache", added={"kv_cache": True}),
    Optimization(name="static batches", added={"max_num_seqs": 8}),
    Optimization(name="continuous_batching", added={"continuous_batching": True, "max_num_seqs": 256}),
    Optimization(name="packed prefill", added={"attention_backend": "sdpa"}),
    Optimization(name="chunked_prefill", added={"enable_chunked_prefill": True}),
    Optimization(name="prefix_caching", added={"enable_prefix_caching": True}),
    Optimization(name="fused_moe", added={"fused_moe": True}, rounds=True),
    Optimization(name="attention backend", added={"attention_backend": "auto"}, rounds=True),
    Optimization(name="gpu_sampler", added={"gpu_sampler": True}, needs_gpu=True),
    Optimization(name="compile", added={"compile_layers": True}, rounds=True, needs_gpu=True),
    Optimization(name="cuda_graphs", added={"enforce_eager": False}, rounds=True, needs_gpu=True),
    Optimization(name="async_scheduling", added={"async_scheduling": True}, needs_gpu=True),
    Optimization(name="fp8", added={"quantization": "fp8"}, rounds=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationSettings:
    """What to climb with."""

    model: str
    """Folder."""
    on_gpu: bool
    """Whether the rungs that need a GPU are climbed."""
    load_format: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    num_requests: int = 32
    naive_requests: int = 4
    """Of the first two rungs: their speed per token does not depend on how many there are."""
    input_len: tuple[int, int] = (16, 64)
    output_len: tuple[int, int] = (16, 64)
    shared: int = 32
    """Tokens that all prompts begin with."""
    turns: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """What was found on one rung."""

    name: str
    added: Arguments
    rounds: bool
    tokens_per_s: float
    """Of output, the median of the turns."""
    tokens: int
    """In one turn."""
    seconds: tuple[float, ...]
    """Of each turn."""
    peak_bytes: int
    """Of the rung's process, or its GPU."""
    equal: float
    """Part of the tokens that are those of the first rung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationResult:
    """The output of `bench --engine embedded --ablate --json`."""

    settings: AblationSettings
    rungs: tuple[Rung, ...]
    left_out: tuple[str, ...]
    """Rungs that need a GPU."""
