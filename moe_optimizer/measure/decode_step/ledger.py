"""Adds up a profile of decode steps by kernel group, beside the least time that the group's bytes take."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from moe_optimizer.costs.roofline import DecodeStep, decode_step_bytes, memory_bandwidth
from moe_optimizer.measure.decode_step.kernel_groups import ATTENTION, EXPERTS, GROUPS, MATRICES, group_of
from moe_optimizer.measure.decode_step.profiled_steps import StepProfile
from moe_optimizer.specs.hardware import GpuSpec
from moe_optimizer.specs.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One group of kernels in one decode step."""

    group: str
    calls: float
    us: float
    least_us: float | None
    """Bytes that the group reads over the memory bandwidth; None: the group reads next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where the time of a decode step goes."""

    batch: int
    context: int
    step_us: float
    """Wall time of a step without the profiler."""
    rows: tuple[LedgerRow, ...]
    """The longest first."""

    @property
    def kernels_us(self) -> float:
        """All kernels together; what the step takes beyond that, the GPU waits."""
        return sum(row.us for row in self.rows)


def ledger_of(
    profile: StepProfile, model: ModelSpec, gpu: GpuSpec, *, expert_bits: float, linear_bits: float, kv_bits: float = 16
) -> Ledger:
    """Return the ledger of one profile, on one GPU.

    Args:
        profile: measured.
        model: what was decoded.
        gpu: its measured copy rate counts where it has one, else the datasheet's.
        expert_bits: stored bits of one weight of a routed expert.
        linear_bits: the same of the other matrices.
        kv_bits: of one cache element.
    """
    step = DecodeStep(
        model=model, batch=profile.batch, context=profile.context, num_gpus=1,
        expert_bits=expert_bits, linear_bits=linear_bits, kv_bits=kv_bits,
    )  # fmt: skip
    read = decode_step_bytes(step)
    bytes_per_us = memory_bandwidth(gpu, "measured").value / 1e6
    least = {EXPERTS: read.experts, MATRICES: read.matrices, ATTENTION: read.cache}
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, float] = defaultdict(float)
    for kernel in profile.kernels:
        group = group_of(kernel.name)
        times[group] += kernel.us
        calls[group] += kernel.calls
    rows = tuple(
        LedgerRow(
            group=group,
            calls=round(calls[group], 2),
            us=round(times[group], 2),
            least_us=round(least[group] / bytes_per_us, 2) if group in least else None,
        )
        for group in GROUPS
        if group in times
    )
    by_time = tuple(sorted(rows, key=lambda row: -row.us))
    return Ledger(batch=profile.batch, context=profile.context, step_us=round(profile.step_us, 1), rows=by_time)
