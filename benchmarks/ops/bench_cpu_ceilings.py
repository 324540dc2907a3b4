"""Measures how fast the machine reads and multiplies, in the same turns as the compared kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from moe_optimizer.ops.huge_pages import use_huge_pages

_GEMM = 2048
_REPETITIONS, _PATIENCE_S = 7, 10.0


class Ceilings:
    """Memory read by a sum and FP32 products by torch, one call at a time.

    Neighbours on the same host take bandwidth and clock away for seconds, so a ceiling measured once is none: each turn
    of a case measures them again, and a share is of the same turn.
    """

    def __init__(self) -> None:
        self._block = torch.ones(1 << 26)  # 256 MiB, on huge pages where they are to be had: they read faster
        use_huge_pages(self._block)
        self._factors = torch.randn(_GEMM, _GEMM), torch.randn(_GEMM, _GEMM)
        self._halves = self._factors[0].bfloat16(), self._factors[1].bfloat16()

    def read_bytes_per_s(self) -> float:
        """Bytes per second of one sum over 256 MiB."""
        return self._block.nbytes / _seconds(self._block.sum)

    def fp32_flops_per_s(self) -> float:
        """FP32 operations per second of one 2048^3 product."""
        return 2 * _GEMM**3 / _seconds(lambda: self._factors[0] @ self._factors[1])

    def bf16_flops_per_s(self) -> float:
        """BF16 operations per second of one 2048^3 product."""
        return 2 * _GEMM**3 / _seconds(lambda: self._halves[0] @ self._halves[1])

    def summary(self) -> dict[str, float]:
        """Return the medians, for the head of the record."""
        kinds = {
            "read_gb_per_s": self.read_bytes_per_s,
            "fp32_gemm_gflop_per_s": self.fp32_flops_per_s,
            "bf16_gemm_gflop_per_s": self.bf16_flops_per_s,
        }
        return {name: _median(measured) / 1e9 for name, measured in kinds.items()}


def _median(measured: Callable[[], float]) -> float:
    """Return the median of repetitions, fewer where they are long: without BF16 instructions torch takes a minute."""
    began, found = time.perf_counter(), [measured()]
    while len(found) < _REPETITIONS and time.perf_counter() - began < _PATIENCE_S:
        found.append(measured())
    return statistics.median(found)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
