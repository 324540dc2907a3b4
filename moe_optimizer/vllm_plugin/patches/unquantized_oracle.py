"""Offers our experts class first where vLLM chooses the kernel of unquantized MoE layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.vllm_plugin.activation import EXPERTS_PASS, Activation, current
from moe_optimizer.vllm_plugin.patch import Patch
from moe_optimizer.vllm_plugin.proof import described
from moe_optimizer.vllm_plugin.server_facts import server_facts, world

# The backends under which vLLM hands the weights on in their loaded layout. Under the others it swaps, pads or
# shuffles them for the stock kernel before ours would see them.
_PLAIN_LAYOUT_BACKENDS = frozenset({"CPU", "TRITON"})


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backend_to_kernel_cls(backend: Any) -> Any:
        classes = original(backend)
        activation = current()
        if activation is None or getattr(backend, "name", "") not in _PLAIN_LAYOUT_BACKENDS:
            return classes
        try:
            return [*_offered_classes(activation, classes), *classes]
        except RequiredNotAppliedError:
            raise
        except Exception as error:  # noqa: BLE001 - vLLM is choosing a kernel; stock must stay reachable
            activation.refused(EXPERTS_PASS, f"fallback: {described(error)}")
            return classes

    return backend_to_kernel_cls


def _offered_classes(activation: Activation, stock: Sequence[type]) -> list[type]:
    activation.resolve_plan(server_facts)
    if activation.wanted(EXPERTS_PASS) is None:
        return []
    activation.proof.model_rank, activation.proof.world_size = world()
    from moe_optimizer.vllm_plugin.experts_cpu import MoeOptimizerCpuExperts

    MoeOptimizerCpuExperts.stock_classes = tuple(stock)
    return [MoeOptimizerCpuExperts]


UNQUANTIZED_ORACLE = Patch(
    target="vllm.model_executor.layers.fused_moe.oracle.unquantized:backend_to_kernel_cls",
    why="vLLM asks a fixed list of classes which of them computes an unquantized MoE layer; there is no way to "
    "register one from outside",
    remove_when="vLLM lets out-of-tree MoE backends register (pull request 53897); the class stays as it is",
    fingerprints={
        "0.26 to 0.27": "4f8ac45abed86ca6",
        "0.28 to 0.30": "89a607bc5f183ec7",
        "0.31 to 0.32": "259b71de159bb70d",
        "0.33": "f0914422b8321d51",
    },
    replacement=_replacement,
)
