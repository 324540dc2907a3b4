from __future__ import annotations

import re

import pytest

from moe_optimizer.costs.fp8_blocks import block_of_slice, padded_experts, ragged_linear, whole_blocks
from tests.builders import deepseek_v3, dense_model, mixtral_8x7b, qwen3_30b_a3b, shaped_model


@pytest.mark.parametrize("model", [qwen3_30b_a3b(), mixtral_8x7b(), deepseek_v3(), dense_model()], ids=lambda m: m.name)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_linears_of_published_models_divide_into_blocks(model, devices):
    assert ragged_linear(model, devices) == ""


@pytest.mark.parametrize(
    ("shape", "devices", "what"),
    [
        ({"hidden": 2000}, 1, "the model width.* 2000 "),
        ({"heads": 8, "head_dim": 64}, 8, "the attention heads.* 64 "),
        ({"dense_layers": 1, "dense_width": 10944}, 1, "the dense MLP.* 10944 "),
        ({"shared": 1, "width": 704}, 1, "the shared experts.* 704 "),
    ],
)
def test_the_first_that_does_not_divide_is_named(shape, devices, what):
    assert re.match(what, ragged_linear(shaped_model(**shape), devices))


def test_a_gate_beside_the_shared_experts_does_not_matter():
    model = shaped_model(shared=1, width=768)
    with_gate = shaped_model(shared=1, width=768, shared_expert_params=model.shared_expert_params + 48 * 2048)
    assert ragged_linear(with_gate, 1) == ""


def test_experts_are_filled_up_to_whole_blocks():
    model = qwen3_30b_a3b()  # 768 wide
    assert padded_experts(model, 2, expert_parallel=False) == 1.0
    assert padded_experts(model, 4, expert_parallel=False) == pytest.approx(256 / 192)
    assert padded_experts(model, 4, expert_parallel=True) == 1.0
    assert padded_experts(dense_model(), 4, expert_parallel=False) == 1.0


def test_a_width_is_filled_up_to_whole_blocks():
    assert [whole_blocks(size) for size in (1, 128, 192, 768)] == [128, 128, 256, 768]


@pytest.mark.parametrize(
    ("width", "slices", "block"),
    [
        (768, 1, (128, 128)),
        (384, 2, (128, 128)),
        (192, 4, (64, 64)),
        (96, 8, (32, 32)),
        (88, 8, (128, 128)),
    ],
    ids=["whole", "half, three blocks", "64 divides", "32 divides", "nothing from 32 on divides"],
)
def test_scales_of_a_slice_have_a_block_that_divides_it(width, slices, block):
    assert block_of_slice((128, 128), width, 2048, slices) == block
