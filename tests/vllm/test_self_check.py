"""A layer whose kernel turns out wrong on its own weights: vLLM's class computes it, and the proof says why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.vllm.expert_layers import PASS, activated, make_cpu_experts, make_layer

TOKENS = 6


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSession:
    return activated(tmp_path, monkeypatch)


@pytest.fixture
def wrong_on_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with the experts in another order."""
    from moe_optimizer.ops.fused_experts import fused_experts as right

    def swapped(x: Any, w13: Any, w2: Any, weights: Any, ids: Any, **kwargs: Any) -> Any:
        return right(x, w13.flip(0), w2, weights, ids, **kwargs)

    monkeypatch.setattr(sys.modules["moe_optimizer.ops.fused_experts"], "fused_experts", swapped)


def forward(experts: Any, layer: Any, *, weighted_input: bool = False) -> tuple[Any, Any]:
    """Return what the class computes, and what plain torch says."""
    import torch

    from moe_optimizer.ops.reference import fused_experts

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, 128, generator=generator)
    weights, ids = torch.randn(TOKENS, 16, generator=generator).softmax(-1).topk(4)
    loaded = make_layer()
    used = torch.ones_like(weights) if weighted_input else weights
    biases = {"w13_bias": experts.w1_bias, "w2_bias": experts.w2_bias}
    want = fused_experts(x, loaded.w13_weight, loaded.w2_weight, used, ids.int(), **biases)
    got = torch.empty_like(x)
    nothing = torch.empty(0)
    experts.apply(
        output=got,
        hidden_states=x,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        topk_weights=weights,
        topk_ids=ids.int(),
        activation=experts.moe_config.activation,
        global_num_experts=16,
        expert_map=layer.expert_map,
        a1q_scale=None,
        a2_scale=None,
        workspace13=nothing,
        workspace2=nothing,
        expert_tokens_meta=None,
        apply_router_weight_on_input=weighted_input,
    )
    return got, want


def test_routing_weights_that_vllm_multiplied_the_input_with_are_not_applied_again(session: PluginSession) -> None:
    import torch

    layer, experts = make_layer(), make_cpu_experts()
    experts.process_weights_after_loading(layer)
    got, want = forward(experts, layer, weighted_input=True)
    torch.testing.assert_close(got, want)


def test_biases_are_added(session: PluginSession) -> None:
    import torch

    layer = make_layer()
    generator = torch.Generator().manual_seed(2)
    w1_bias, w2_bias = (torch.randn(w.shape[:2], generator=generator) for w in (layer.w13_weight, layer.w2_weight))
    experts = make_cpu_experts(w1_bias=w1_bias, w2_bias=w2_bias)
    experts.process_weights_after_loading(layer)
    got, want = forward(experts, layer)
    torch.testing.assert_close(got, want)


def test_a_right_layer_is_ours_and_its_error_is_in_the_proof(session: PluginSession) -> None:
    import torch

    layer, experts = make_layer(), make_cpu_experts()
    experts.process_weights_after_loading(layer)
    got, want = forward(experts, layer)
    torch.testing.assert_close(got, want)
    (entry,) = session.proof.passes[PASS].layers
    assert (entry.calls, entry.tokens) == (1, TOKENS)
    assert entry.self_check_error is not None
    assert entry.self_check_error <= 1


def test_a_wrong_layer_is_computed_by_vllm_and_the_reason_is_in_the_proof(
    session: PluginSession, wrong_on_weights: None
) -> None:
    import torch

    layer, experts = make_layer(), make_cpu_experts()
    experts.process_weights_after_loading(layer)
    got, want = forward(experts, layer)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    proof = session.proof.passes[PASS]
    assert proof.layers == ()
    assert not proof.ran
    assert "model.layers.0.mlp.experts: self-check failed: " in proof.why_not


def test_a_wrong_layer_of_a_required_pass_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_on_weights: None
) -> None:
    activated(tmp_path, monkeypatch, required=(PASS,))
    with pytest.raises(RequiredNotAppliedError, match="self-check failed"):
        make_cpu_experts().process_weights_after_loading(make_layer())


def test_with_an_expert_map_there_is_nothing_to_hand_it_to(
    session: PluginSession, wrong_on_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    layer = make_layer()
    layer.expert_map = torch.tensor([index // 2 if index % 2 else -1 for index in range(32)], dtype=torch.int32)
    with pytest.raises(RequiredNotAppliedError, match="expert map"):
        make_cpu_experts().process_weights_after_loading(layer)


def test_the_check_costs_little_beside_loading(session: PluginSession) -> None:
    """A layer of 64 experts reads the weights of four of them."""
    calls: list[int] = []
    from moe_optimizer.vllm_plugin.experts.weight_format import WeightFormat

    original: Callable[..., Any] = WeightFormat.dense_expert

    def counted(self: Any, weights: Any, expert: int) -> Any:
        calls.append(expert)
        return original(self, weights, expert)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightFormat, "dense_expert", counted)
        make_cpu_experts().process_weights_after_loading(make_layer())
    assert len(calls) == 4
