"""The CUDA experts classes as vLLM is offered them, beside a stand-in for its own, under a plan of the test's."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.plan.decision import Applier, Status
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.specs.kernel_speeds import TokenRange
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.plugin_state import own_session
from tests.vllm.conftest import tiny_plan
from tests.vllm.expert_layers import PASS, moe_config

RANGES = tuple(
    TokenRange(up_to=up_to, use=use) for up_to, use in ((2, "direct"), (4, "stock"), (8, "grouped-bf16-n16"))
)
"""The dispatch of the tests' plans."""


def activated(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, dispatch: Any, *, required: bool = False, **others: Any
) -> PluginSession:
    """Make a plan with our kernels on this process's own.

    Args:
        run_dir: gets the proof.
        monkeypatch: ends it with the test.
        dispatch: weights -> which kernel for how many tokens.
        required: the plan requires our kernels.
        others: further passes that are on -> their parameters.
    """
    from moe_optimizer.vllm_plugin import session as sessions

    own_session(monkeypatch)
    plan = tiny_plan()
    params = {PASS: FlashDmoeParams(kernel="cuda", dispatch=dispatch), **others}
    decisions = tuple(
        dataclasses.replace(
            each,
            status=Status.ON,
            applier=Applier.PLUGIN,
            required=required and each.pass_name == PASS,
            params=params[each.pass_name],
        )
        if each.pass_name in params
        else each
        for each in plan.decisions
    )
    return sessions.start_session(PluginSession(run_dir=run_dir, plan=plan.replace(decisions=decisions)))


def as_on_hopper(monkeypatch: pytest.MonkeyPatch, *built: str) -> None:
    """Have the classes find a GPU that they run on, and a build that has these functions."""
    from moe_optimizer.vllm_plugin.experts import cuda

    monkeypatch.setattr(cuda._load, "kernels", lambda: SimpleNamespace(**dict.fromkeys(built)))
    monkeypatch.setattr(cuda.MoeOptimizerCudaExperts, "_supports_current_device", staticmethod(lambda: True))


@contextlib.contextmanager
def asked_on_a_gpu() -> Iterator[None]:
    """As vLLM's platform answers while it builds the model."""
    from vllm.platforms import current_platform

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "is_cpu", lambda _: False)
        yield


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


class Kernels:
    """Stand-ins for the compiled kernels: compute, and note what was asked."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, int]] = []
        self.wrong: str = ""
        """A variant that computes twice the result."""
        self.change: Callable[[Any], Any] = lambda problem: problem
        """What a wrong kernel computes instead."""
        self.failure: Exception | None = None

    def run(self, problem: Any, variant: Any) -> None:
        from moe_optimizer.ops.int4 import Int4Weight
        from moe_optimizer.ops.reference import fused_experts

        if self.failure is not None:
            raise self.failure
        self.runs.append((str(variant), problem.x.shape[0]))
        changed = self.change(problem)
        (w13, w2), scales = (changed.w13, changed.w2), (changed.w13_scale, changed.w2_scale)
        if changed.int4:
            w13 = Int4Weight(w13, changed.w13_scale, changed.w13_zero)
            w2, scales = Int4Weight(w2, changed.w2_scale, changed.w2_zero), (None, None)
        out = fused_experts(
            changed.x, w13, w2, changed.topk_weights, changed.topk_ids,
            expert_map=changed.expert_map, w13_scale=scales[0], w2_scale=scales[1],
            w13_bias=changed.w13_bias, w2_bias=changed.w2_bias, activation=changed.activation,
        )  # fmt: skip
        problem.out.copy_(out * (2 if str(variant) == self.wrong else 1))


def stand_in_kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Put stand-ins in the place of the compiled kernels."""
    import torch

    from moe_optimizer.vllm_plugin.experts import cuda_layer

    fake = Kernels()
    monkeypatch.setattr(cuda_layer.cuda_dispatch, "run", fake.run)
    monkeypatch.setattr(cuda_layer.cuda_dispatch, "prepare_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


def modular_kernel(experts_class: Any, quant_config: Any, **changes: Any) -> Any:
    """Return vLLM's kernel object over an experts class, as its method of a layer makes it."""
    import torch
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular

    config = moe_config(in_dtype=torch.bfloat16, **changes)
    return mk.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), experts_class(config, quant_config))
