"""What is added up of a call. With vLLM: tests/vllm/test_sparsity_24.py."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_optimizer.measure.activation_norms import ActivationNorms  # noqa: E402
from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall, KernelWeights  # noqa: E402

EXPERTS, HIDDEN, WIDTH = 3, 8, 4


def call_of(x: Any, ids: list[list[int]]) -> ExpertsCall:
    return ExpertsCall(
        out=torch.empty_like(x),
        x=x,
        topk_weights=torch.ones(len(ids), 2),
        topk_ids=torch.tensor(ids, dtype=torch.int32),
        expert_map=None,
        w13_bias=None,
        w2_bias=None,
    )


def test_rows_of_padding_add_nothing_to_any_expert() -> None:
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator)
    weights = KernelWeights(format="plain", w13=w13, w2=torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator))
    x = torch.randn(4, HIDDEN, generator=generator)
    ids = [[0, 1], [1, 0], [-1, -1], [-1, -1]]
    padded, alone = ActivationNorms(), ActivationNorms()
    padded.add(0, weights, call_of(x, ids))
    alone.add(0, weights, call_of(x[:2], ids[:2]))
    ((x_norms, h_norms),) = padded.by_layer().values()
    ((x_alone, h_alone),) = alone.by_layer().values()
    torch.testing.assert_close(x_norms, x_alone)
    torch.testing.assert_close(h_norms, h_alone)
    # The last expert was given no token: magnitude alone decides for it.
    assert bool((h_norms[-1] == 1).all())
