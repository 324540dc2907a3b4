"""Makes vLLM's own experts slow where a server's Python starts with it: our kernels then win for certain."""

from __future__ import annotations

import time
from typing import Any

SLOW_S = 0.02
"""Longer by each layer."""


def _slow(module: Any) -> None:
    compute = module.CPUUnquantizedExperts.apply

    def apply(self: Any, *arguments: Any, **named: Any) -> Any:
        time.sleep(SLOW_S)
        return compute(self, *arguments, **named)

    module.CPUUnquantizedExperts.apply = apply


if __name__ == "slow_stock":
    import after_import  # of tests/vllm/forked

    after_import.change("vllm.model_executor.layers.fused_moe.experts.cpu_moe", _slow)
