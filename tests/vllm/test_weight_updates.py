"""A layer whose experts are served by our kernels gets new weights, through vLLM's own layerwise reload."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.vllm_plugin.session import PluginSession
from moe_optimizer.vllm_plugin.worker.weights_changed import WatchedWorker
from tests.plugin_state import own_session
from tests.vllm.conftest import plan_here
from tests.vllm.expert_layers import EXPERTS, HIDDEN, PASS, TOP_K, WIDTH, moe_config

torch = pytest.importorskip("torch")

TOKENS = 24
FORMATS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 0.01),
    "fp8 by block": ({"wishes": resolve_wishes(("fp8",), ())}, 0.06),
    "fp8 by channel": ({"wishes": resolve_wishes(("fp8",), ()), "granularity": "channel"}, 0.06),
    # Half of the weights are zero: only that the new ones count is looked at.
    "pruned": ({"wishes": resolve_wishes(("sparsity",), ())}, 0.9),
}
"""Format -> fields of the plan's request, and the relative error of a layer's output that it may have."""


def new_weights(seed: int, scale: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w13_weight": (EXPERTS, 2 * WIDTH, HIDDEN), "w2_weight": (EXPERTS, HIDDEN, WIDTH)}
    return {name: (torch.randn(*shape, generator=generator) * scale).bfloat16() for name, shape in shapes.items()}


class Served:
    """One of vLLM's layers with its unquantised method and our class, loaded as a model is."""

    def __init__(self, weights: dict[str, Any]) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.oracle import unquantized
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        from moe_optimizer.vllm_plugin.experts.cpu import MoeOptimizerCpuExperts

        config = moe_config(in_dtype=torch.bfloat16)
        stock = unquantized.backend_to_kernel_cls(unquantized.UnquantizedMoeBackend.CPU)
        with set_current_vllm_config(VllmConfig()):
            method: Any = UnquantizedFusedMoEMethod(config)
        method.experts_cls = type("Offered", (MoeOptimizerCpuExperts,), {"stock_classes": tuple(stock)})
        layer: Any = torch.nn.Module()
        for name, values in weights.items():
            layer.register_parameter(name, torch.nn.Parameter(torch.empty_like(values), requires_grad=False))
        layer.layer_name, layer.expert_map, layer.moe_config = "model.layers.0.mlp.experts", None, config
        layer.activation, layer.global_num_experts = MoEActivation.SILU, EXPERTS
        layer._expert_routing_tables = lambda: None
        layer.quant_method = method
        self.layer, self.model = layer, torch.nn.Sequential(layer)
        record_metadata_for_reloading(self.model)
        self.load(weights)
        method.process_weights_after_loading(layer)
        # vLLM asks every method again once the last layer is loaded.
        method.process_weights_after_loading(layer)

    def load(self, weights: dict[str, Any]) -> None:
        for name, values in weights.items():
            parameter = getattr(self.layer, name)
            getattr(parameter, "weight_loader", lambda target, source: target.data.copy_(source))(parameter, values)

    def reload(self, weights: dict[str, Any]) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        self.load(weights)
        finalize_layerwise_reload(self.model, None)

    def addresses(self) -> dict[str, int]:
        return {name: value.data_ptr() for name, value in self.layer.named_parameters()}

    def error(self, weights: dict[str, Any]) -> float:
        """By how much the layer's output differs from that of these weights, relative to it."""
        from moe_optimizer.ops.reference import fused_experts

        generator = torch.Generator().manual_seed(9)
        x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
        topk_weights, ids = torch.randn(TOKENS, EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
        layer = self.layer
        got = layer.quant_method.moe_kernel.apply(
            x, layer.w13_weight, layer.w2_weight, topk_weights, ids.int(), layer.activation, EXPERTS, None, False
        )
        w13, w2 = (weights[name].float() for name in ("w13_weight", "w2_weight"))
        want = fused_experts(x.float(), w13, w2, topk_weights, ids.int())
        return float((got.float() - want).norm() / want.norm())


@pytest.fixture
def session(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSession:
    from moe_optimizer.vllm_plugin import session as sessions
    from tests.builders import profile_with

    fields = dict(FORMATS[request.param][0])
    granularity = fields.pop("granularity", "block")
    profile = profile_with("balanced", {"fp8": {"granularity": granularity}})
    plan = plan_here(dtype="bfloat16", profile=profile, **fields)
    own_session(monkeypatch)
    return sessions.start_session(PluginSession(run_dir=tmp_path, plan=plan))


each_format = pytest.mark.parametrize(
    ("session", "bound"),
    [(name, bound) for name, (_, bound) in FORMATS.items()],
    indirect=["session"],
    ids=list(FORMATS),
)


@each_format
def test_after_a_reload_the_layer_computes_with_the_new_weights(session: PluginSession, bound: float) -> None:
    first, second, third = new_weights(1, 0.1), new_weights(2, 0.003), new_weights(3, 2.0)
    served = Served(first)
    assert served.error(first) < bound
    held = served.addresses()
    for weights in (second, third):
        served.reload(weights)
        assert served.error(weights) < bound
        # Compiled graphs keep reading where they did.
        assert served.addresses() == held
    assert session.proof.passes[PASS].why_not == ""
    assert len(session.proof.passes[PASS].layers) == 1


class Worker:
    """As much of vLLM's worker as is watched, over one served layer."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.model_runner = SimpleNamespace(get_model=lambda: served.model)
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=200))
        self.slept: list[int] = []

    def compile_or_warm_up_model(self) -> float:
        return 1.5

    def reload_weights(
        self, weights: dict[str, Any], weights_path: Any = None, is_checkpoint_format: bool = True
    ) -> None:
        if is_checkpoint_format:
            self._served.reload(weights)
            return
        for name, values in weights.items():
            getattr(self._served.layer, name).data.copy_(values)

    def start_weight_update(self) -> None:
        """Ready for tensors of a trainer."""

    def finish_weight_update(self) -> None:
        """All have come."""

    def sleep(self, level: int = 1) -> None:
        self.slept.append(level)

    def wake_up(self, tags: Any = None) -> None:
        """Weights are back, or garbage after level 2."""


def watched(session: PluginSession, served: Served) -> Worker:
    worker = Worker(served)
    WatchedWorker(session, worker).watch()
    assert worker.compile_or_warm_up_model() == 1.5
    return worker


@each_format
def test_the_canary_runs_before_ready_and_after_every_change(session: PluginSession, bound: float) -> None:
    served = Served(new_weights(1, 0.1))
    worker = watched(session, served)
    proof = session.proof.passes[PASS]
    assert re.match("passed before.*: 1 .* 1 to 200 ", proof.canary)
    for change, when in (
        (lambda: worker.reload_weights(new_weights(2, 0.1)), "after a reload"),
        (worker.wake_up, "after waking up"),
    ):
        change()
        assert proof.canary.startswith(f"passed {when}:")
    # None of it was a request's.
    assert not proof.ran
    assert proof.calls == 0


@each_format
def test_weights_in_the_kernels_own_form_are_taken_only_by_layers_that_have_it(
    session: PluginSession, bound: float
) -> None:
    served, new = Served(new_weights(1, 0.1)), new_weights(2, 0.003)
    worker = watched(session, served)
    if session.proof.passes[PASS].layers[0].weight_format == "plain":
        worker.reload_weights(new, is_checkpoint_format=False)
        worker.start_weight_update()
        worker.finish_weight_update()
        assert served.error(new) < bound
        return
    for call in (
        lambda: worker.reload_weights(new, is_checkpoint_format=False),
        lambda: worker.reload_weights(new, None, False),
        worker.start_weight_update,
        lambda: served.load(new),
    ):
        with pytest.raises(InputError, match="new weights"):
            call()
    assert served.error(new_weights(1, 0.1)) < bound


@each_format
def test_after_a_sleep_that_discards_the_weights_the_canary_waits_for_new_ones(
    session: PluginSession, bound: float
) -> None:
    served = Served(new_weights(1, 0.1))
    worker = watched(session, served)
    worker.sleep(level=2)
    for parameter in served.layer.parameters():
        parameter.data.zero_()
    before = session.proof.passes[PASS].canary
    worker.wake_up(tags=["weights"])
    assert session.proof.passes[PASS].canary == before
    worker.reload_weights(new_weights(2, 0.1))
    assert session.proof.passes[PASS].canary.startswith("passed after ")
    assert served.error(new_weights(2, 0.1)) < bound


@pytest.mark.parametrize("session", ["fp8 by block"], indirect=True)
def test_a_waking_cache_alone_does_not_touch_the_weights(session: PluginSession) -> None:
    worker = watched(session, Served(new_weights(1, 0.1)))
    before = session.proof.passes[PASS].canary
    worker.wake_up(tags=["kv_cache"])
    assert session.proof.passes[PASS].canary == before


@pytest.mark.parametrize("session", ["fp8 by block"], indirect=True)
def test_weights_that_cannot_be_converted_fail_the_reload(session: PluginSession) -> None:
    served = Served(new_weights(1, 0.1))
    wrong = new_weights(2, 0.1)
    wrong["w2_weight"][3, 5, 7] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        served.reload(wrong)
