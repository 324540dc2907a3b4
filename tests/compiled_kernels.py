"""Whether the CPU kernels are compiled here, and for which instruction sets."""

from __future__ import annotations

import pytest

from moe_optimizer.ops import best_isa, kernels_available

AVAILABLE, REASON = kernels_available()
needs_kernels = pytest.mark.skipif(not AVAILABLE, reason=f"compiled kernels: {REASON}")

_FROM_LEAST = ("generic", "avx2", "avx512", "avx512_bf16")
ISAS = _FROM_LEAST[: _FROM_LEAST.index(best_isa()) + 1] if AVAILABLE else ()
