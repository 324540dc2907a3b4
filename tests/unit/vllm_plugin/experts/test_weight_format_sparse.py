"""Experts pruned to two of four: which layers are converted, which stay and say why; norms measured and used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import save_file  # noqa: E402

from moe_optimizer.measure.activation_norms import ActivationNorms  # noqa: E402
from moe_optimizer.ops.sparse_24 import SparseWeight, expand_24, prune_24  # noqa: E402
from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights  # noqa: E402
from moe_optimizer.vllm_plugin.experts.weight_format_sparse import SparseWeights  # noqa: E402
from moe_optimizer.vllm_plugin.session import PluginSession  # noqa: E402
from tests.unit.vllm_plugin.experts.converted_layers import (  # noqa: E402
    NAME,
    layer,
    layer_call,
)

Activate = Callable[..., PluginSession]


@pytest.fixture
def activate(activate_pass: Activate) -> Activate:
    return functools.partial(activate_pass, "sparsity_24")


def test_a_layer_is_pruned_by_magnitude_and_smaller(activate: Activate) -> None:
    activate()
    w13, w2 = layer()
    converted = SparseWeights().convert(NAME, w13, w2)
    assert (converted.format, converted.why_plain) == ("sparse_24", "")
    assert converted.nbytes * 16 == (w13.nbytes + w2.nbytes) * 9
    dense = SparseWeights().dense_expert(converted, 2)
    for restored, original in zip(dense, (w13, w2), strict=True):
        assert torch.equal(restored, expand_24(prune_24(original))[2].float())


def test_measured_norms_choose_with_the_magnitude(activate: Activate, tmp_path: Path) -> None:
    x, h = torch.rand(128), torch.rand(4, 32)
    tensors = {f"layers.{index}.{name}": norms.clone() for index in range(4) for name, norms in (("x", x), ("h", h))}
    path = tmp_path / "norms.safetensors"
    save_file(tensors, path, metadata={"model": "tiny-moe", "tokens": "9"})
    activate(norms=str(path))
    w13, w2 = layer()
    converted = SparseWeights().convert(NAME, w13, w2)
    assert converted.w13_mask is not None
    assert torch.equal(expand_24(SparseWeight(converted.w13, converted.w13_mask)), expand_24(prune_24(w13, x)))
    assert converted.w2_mask is not None
    assert torch.equal(expand_24(SparseWeight(converted.w2, converted.w2_mask)), expand_24(prune_24(w2, h)))
    assert not torch.equal(converted.w13, prune_24(w13).values)


def test_norms_are_over_all_calls_and_of_the_experts_own_tokens() -> None:
    w13, w2 = layer()
    weights, norms = KernelWeights(format="plain", w13=w13, w2=w2), ActivationNorms()
    calls = [layer_call(tokens, even=(0, 1), odd=(2, 1)) for tokens in (6, 2)]
    for call in calls:
        norms.add(0, weights, call)
    ((x, h),) = norms.by_layer().values()
    inputs = torch.cat([call.x for call in calls]).float()
    torch.testing.assert_close(x, inputs.norm(dim=0))
    for expert, rows in ((0, inputs[0::2]), (1, inputs), (2, inputs[1::2])):
        gate, up = (rows @ w13[expert].float().T).chunk(2, dim=-1)
        torch.testing.assert_close(h[expert], (torch.nn.functional.silu(gate) * up).norm(dim=0))
    assert torch.equal(h[3], torch.ones(32))  # no token went there
