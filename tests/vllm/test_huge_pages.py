"""The CPU experts class puts a loaded layer's weights on huge pages, or the proof says why not."""

from __future__ import annotations

from typing import Any

import pytest

from moe_optimizer.vllm_plugin.activation import Activation
from tests.ops.test_huge_pages import huge_bytes
from tests.vllm.test_self_check import PASS, activation, make_experts

pytestmark = pytest.mark.vllm
__all__ = ["activation"]  # the fixture


def loaded_layer(intermediate: int) -> Any:
    import torch

    layer: Any = torch.nn.Module()
    for name, shape in (("w13_weight", (16, 2 * intermediate, 128)), ("w2_weight", (16, 128, intermediate))):
        layer.register_parameter(name, torch.nn.Parameter(torch.randn(*shape) * 0.1, requires_grad=False))
    layer.layer_name = "model.layers.0.mlp.experts"
    layer.expert_map = None
    return layer


def test_a_loaded_layer_is_on_huge_pages_or_the_proof_says_why_not(activation: Activation) -> None:
    layer = loaded_layer(2048)  # 32 MiB and 16 MiB
    make_experts().process_weights_after_loading(layer)
    (entry,) = activation.proof.passes[PASS].layers
    if entry.why_small_pages:
        pytest.skip(f"this machine: {entry.why_small_pages}")
    for weight in (layer.w13_weight, layer.w2_weight):
        assert huge_bytes(weight.data_ptr() + (4 << 20)) >= 8 << 20


def test_weights_too_small_for_a_huge_page_are_said_to_be(activation: Activation) -> None:
    make_experts().process_weights_after_loading(loaded_layer(16))
    (entry,) = activation.proof.passes[PASS].layers
    assert entry.why_small_pages == "the tensor is smaller than a huge page"
