from __future__ import annotations

import pytest

from moe_optimizer.specs.lora_targets import reach_experts


@pytest.mark.parametrize(
    ("target_modules", "reached"),
    [
        (None, True),
        ([], False),
        (["q_proj", "k_proj", "v_proj", "o_proj", "gate"], False),
        # A dense layer's, or a shared expert's: linears.
        (["gate_proj", "up_proj", "down_proj", "gate_up_proj"], False),
        (["model.layers.0.mlp.shared_experts.down_proj", "shared_experts"], False),
        (["q_proj", "experts"], True),
        (["model.layers.3.mlp.experts"], True),
        (["experts.0.gate_proj"], True),
        (["experts.w1"], True),
        (["text_experts"], True),
    ],
)
def test_names_of_experts_or_of_their_matrices_reach_them(target_modules, reached):
    assert reach_experts(target_modules) is reached
