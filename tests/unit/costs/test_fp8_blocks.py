from __future__ import annotations

import pytest

from moe_optimizer.costs.fp8_blocks import block_of_slice, padded_experts, whole_blocks
from tests.builders import dense_model, qwen3_30b_a3b


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
