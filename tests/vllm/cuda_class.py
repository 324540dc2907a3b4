"""The CUDA experts classes as vLLM is offered them, beside a stand-in for its own, under a plan of the test's."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.plan.decision import Applier, Status
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.specs.kernel_speeds import TokenRange
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.vllm.conftest import tiny_plan
from tests.vllm.expert_layers import PASS

RANGES = tuple(
    TokenRange(up_to=up_to, use=use) for up_to, use in ((2, "direct"), (4, "stock"), (8, "grouped-bf16-n16"))
)
"""The dispatch of the tests' plans."""


def activated(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, dispatch: Any, *, required: bool = False
) -> PluginSession:
    from moe_optimizer.vllm_plugin import session as sessions

    monkeypatch.setattr(sessions, "_current", None)
    plan = tiny_plan()
    decisions = tuple(
        dataclasses.replace(
            each,
            status=Status.ON,
            applier=Applier.PLUGIN,
            required=required,
            params=FlashDmoeParams(kernel="cuda", dispatch=dispatch),
        )
        if each.pass_name == PASS
        else each
        for each in plan.decisions
    )
    return sessions.start_session(PluginSession(run_dir=run_dir, plan=plan.replace(decisions=decisions)))


def stock_class() -> Any:
    """A stand-in for vLLM's Triton experts with their workspaces and their output in vLLM's buffer."""
    import torch
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    from moe_optimizer.ops.reference import fused_experts

    class Stock(mk.FusedMoEExpertsModular):
        seen: list[Any] = []  # noqa: RUF012 - of the class that one test makes

        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard

        @staticmethod
        def _supports_current_device() -> bool:
            return True

        @staticmethod
        def _supports_no_act_and_mul() -> bool:
            return True

        @staticmethod
        def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
            return True

        @staticmethod
        def _supports_activation(activation: Any) -> bool:
            return True

        @staticmethod
        def _supports_parallel_config(moe_parallel_config: Any) -> bool:
            return True

        def workspace_shapes(self, M: int, N: int, K: int, topk: int, *rest: Any, **_: Any) -> Any:
            return (M, topk, N), (M, topk, K), (M, K)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def apply(self, output: Any, hidden_states: Any, w1: Any, w2: Any, *rest: Any, **_: Any) -> None:
            topk_weights, topk_ids, _, _, expert_map, scale = rest[:6]
            self.seen.append((hidden_states, scale))
            x = hidden_states.to(torch.bfloat16)
            w13_scale, w2_scale = self.w1_scale, self.w2_scale
            output.copy_(
                fused_experts(x, w1, w2, topk_weights, topk_ids, expert_map=expert_map,
                              w13_scale=w13_scale, w2_scale=w2_scale)
            )  # fmt: skip

    return Stock


def offered(module: str, name: str) -> Any:
    base = getattr(importlib.import_module(f"moe_optimizer.vllm_plugin.experts.{module}"), name)
    return type("Offered", (base,), {"stock_classes": (stock_class(),)})
