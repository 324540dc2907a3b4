"""Layers that the plugin converts on a GPU inside vLLM's own modular kernel, on the CPU, with stand-ins as in
test_cuda_experts; tests/gpu/test_four_bit.py has the real kernels.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.ops.mxfp4 import quantize_mxfp4
from moe_optimizer.plan.pass_params import FourBitParams
from moe_optimizer.specs.kernel_speeds import ANY_NUMBER, TokenRange
from moe_optimizer.vllm_plugin.experts.converted_layer import is_converted
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.vllm.cuda_class import Kernels, activated, modular_kernel, offered, stand_in_kernels
from tests.vllm.expert_layers import EXPERTS, HIDDEN, PASS, TOP_K, WIDTH

torch = pytest.importorskip("torch")

FOUR_BIT = "four_bit"
GROUPED = "grouped-mxfp4_weights"
DISPATCH = {"mxfp4": (TokenRange(up_to=2, use="direct"), TokenRange(up_to=ANY_NUMBER, use=GROUPED))}
BF16_BYTES = EXPERTS * 3 * HIDDEN * WIDTH * 2


def plan(run_dir: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> PluginSession:
    fields: dict[str, Any] = {"excluded_layers": (), "max_layer_error": None}
    params = FourBitParams(weight_format="mxfp4", group=32, stored_expert_bits=4.25, **(fields | changes))
    return activated(run_dir, monkeypatch, DISPATCH, four_bit=params)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return stand_in_kernels(monkeypatch)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSession:
    return plan(tmp_path, monkeypatch)


def random_weights(seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    w13 = (torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) * 0.1).bfloat16()
    return w13, (torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator) * 0.1).bfloat16()


class Method:
    """As much of vLLM's quantisation method of a layer as is touched."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

        experts = offered("converted_cuda", "MoeOptimizerConvertedCudaExperts")
        self.moe_kernel: Any = modular_kernel(experts, FusedMoEQuantConfig.make())
        self.processed = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        self.processed += 1


def loaded(layer: Any, weights: tuple[Any, Any]) -> None:
    """Give a layer weights as vLLM's loader does: parameters of its own."""
    for name, tensor in zip(("w13_weight", "w2_weight"), weights, strict=True):
        setattr(layer, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))


@pytest.fixture
def layer(kernels: Kernels, session: PluginSession) -> Any:
    return make_layer()


def make_layer(index: int = 0) -> Any:
    made = torch.nn.Module()
    made.layer_name, made.expert_map, made.quant_method = f"model.layers.{index}.mlp.experts", None, Method()
    loaded(made, random_weights(3))
    return made


def experts_of(layer: Any) -> Any:
    return layer.quant_method.moe_kernel.fused_experts


def forward(layer: Any, tokens: int, *, x: Any = None) -> tuple[Any, Any]:
    """Return what vLLM's kernel gives with the layer's weights as they are now, and what four bits of them would."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from moe_optimizer.ops.reference import fused_experts

    generator = torch.Generator().manual_seed(tokens)
    if x is None:
        x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    topk_weights, ids = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    got = layer.quant_method.moe_kernel.apply(
        x, layer.w13_weight, layer.w2_weight, topk_weights, ids.int(), MoEActivation.SILU, EXPERTS, None,
        apply_router_weight_on_input=False,
    )  # fmt: skip
    scales: dict[str, Any] = {f"{name}_scale": getattr(layer, f"{name}_weight_scale", None) for name in ("w13", "w2")}
    return got, fused_experts(x, layer.w13_weight, layer.w2_weight, topk_weights, ids.int(), **scales)


def test_a_layer_is_converted_once_and_our_kernels_compute_every_number_of_tokens(
    layer: Any, kernels: Kernels, session: PluginSession
) -> None:
    experts_of(layer).finish_loading(layer)
    assert is_converted(layer)
    packed, scale = quantize_mxfp4(random_weights(3)[0])
    assert torch.equal(layer.w13_weight, packed)
    assert torch.equal(layer.w13_weight_scale, scale)
    experts_of(layer).finish_loading(layer)
    kernels.runs.clear()
    for tokens in (1, 2, 3, 700):
        torch.testing.assert_close(*forward(layer, tokens))
    assert kernels.runs == [("direct", 1), ("direct", 2), (GROUPED, 3), (GROUPED, 700)]
    for name in (PASS, FOUR_BIT):
        (entry,) = session.proof.passes[name].layers
        assert (entry.weight_format, entry.loaded_bytes, entry.weight_bytes) == (
            "mxfp4",
            BF16_BYTES,
            BF16_BYTES * 4.25 / 16,
        )
        assert session.proof.passes[name].ran


def test_a_kernel_that_is_wrong_on_the_converted_weights_leaves_the_layer_to_vllm(
    layer: Any, kernels: Kernels, session: PluginSession
) -> None:
    kernels.wrong = GROUPED
    experts_of(layer).finish_loading(layer)
    assert not is_converted(layer)
    torch.testing.assert_close(*forward(layer, 5))
    assert "self-check failed" in session.proof.passes[FOUR_BIT].why_not
    (entry,) = session.proof.passes[PASS].layers
    assert (entry.weight_format, entry.calls_by_kernel) == ("plain", {"stock": 1})
    assert "wrong" in entry.why_plain


def test_a_layer_that_the_plan_keeps_is_computed_by_vllm_and_does_not_hold_up_the_proof(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = plan(tmp_path, monkeypatch, excluded_layers=(1,))
    layers = [make_layer(0), make_layer(1)]
    for each in layers:
        experts_of(each).finish_loading(each)
        torch.testing.assert_close(*forward(each, 5))
    assert [is_converted(each) for each in layers] == [True, False]
    plain = session.proof.passes[PASS].layers[1]
    assert (plain.why_plain, plain.weight_bytes, plain.calls_by_kernel) == (
        "kept by the plan",
        BF16_BYTES,
        {"stock": 1},
    )
    assert session.proof.passes[PASS].ran
    assert [each.name for each in session.proof.passes[FOUR_BIT].layers] == ["model.layers.0.mlp.experts"]


def test_new_weights_are_converted_where_captured_graphs_read_them(layer: Any) -> None:
    experts_of(layer).finish_loading(layer)
    forward(layer, 3)
    old = {name: getattr(layer, name) for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")}
    loaded(layer, random_weights(4))
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.quant_method.processed == 0
    # What vLLM does then: the new values go where the old ones were.
    for name, parameter in old.items():
        parameter.data.copy_(getattr(layer, name))
        setattr(layer, name, parameter)
    assert torch.equal(layer.w13_weight, quantize_mxfp4(random_weights(4)[0])[0])
    torch.testing.assert_close(*forward(layer, 3))
    held = experts_of(layer).served(layer, largest=64, position=0).layer.weights
    assert held.w13.data_ptr() == old["w13_weight"].data_ptr()


def test_activations_that_the_kernels_cannot_read_in_place_are_copied(layer: Any, kernels: Kernels) -> None:
    experts_of(layer).finish_loading(layer)
    kernels.runs.clear()
    wide = torch.randn(3, HIDDEN + 1, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(*forward(layer, 3, x=wide[:, 1:]))
    assert kernels.runs == [(GROUPED, 3)]


def test_a_call_of_another_shape_is_refused_once_nothing_else_reads_the_weights(layer: Any) -> None:
    experts_of(layer).finish_loading(layer)
    with pytest.raises(RequiredNotAppliedError, match="in another way than known"):
        experts_of(layer).apply(output=None, unknown=SimpleNamespace())
