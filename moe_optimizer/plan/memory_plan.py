"""Defines the memory of one GPU (or of the host, on the CPU build) under a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the fullest device. `check_integrity` holds the terms together.

    budget = gpu_memory_utilization * total; budget = weights + activations + workspace + kv_cache + unused
    (unused is negative when the plan does not fit).
    """

    total_bytes: int
    """Memory of the device."""
    budget_bytes: int
    """What the server may use of it."""
    weight_bytes: int
    """Weights on this device after the parallel split."""
    activation_bytes: int
    """Peak of intermediate tensors at max_num_batched_tokens."""
    workspace_bytes: int
    """Runtime context, CUDA graphs, communication buffers and kernel workspaces."""
    kv_cache_bytes: int
    """What is left for the key/value cache; 0 when nothing is."""
    kv_bytes_per_token: float
    """Cache bytes of one token on this device."""
    kv_tokens: int
    """Tokens the cache holds."""
    fits: bool
    num_devices: int
    ref: str
    """How the terms were estimated."""

    @property
    def unused_bytes(self) -> int:
        """Budget that no term uses; negative by how much the plan misses."""
        used = self.weight_bytes + self.activation_bytes + self.workspace_bytes + self.kv_cache_bytes
        return self.budget_bytes - used
