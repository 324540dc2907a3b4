"""Experts pruned to two of four: which layers are converted, which stay and say why; norms measured and used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import save_file  # noqa: E402

from moe_optimizer.errors import RequiredNotAppliedError  # noqa: E402
from moe_optimizer.inspection.activation_norms import read_activation_norms_file  # noqa: E402
from moe_optimizer.measure.activation_norms import ActivationNorms  # noqa: E402
from moe_optimizer.ops import kernels_available  # noqa: E402
from moe_optimizer.ops.sparse_24 import SparseWeight, expand_24, prune_24  # noqa: E402
from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights, planned_format, weight_format  # noqa: E402
from moe_optimizer.vllm_plugin.experts.weight_format_sparse import SparseWeights  # noqa: E402
from moe_optimizer.vllm_plugin.session import PluginSession  # noqa: E402
from tests.unit.vllm_plugin.experts.converted_layers import (  # noqa: E402
    NAME,
    assert_computes_with,
    layer,
    layer_call,
)

Activate = Callable[..., PluginSession]


@pytest.fixture
def activate(activate_pass: Activate) -> Activate:
    """Makes a plan with pruning on, by the norms in a file, this process's own."""

    def start(norms: str | None = None, *, on: bool = True, required: bool = False) -> PluginSession:
        found = read_activation_norms_file(norms)
        return activate_pass("sparsity_24", on=on, required=required, activation_norms=found)

    return start


def test_the_plan_decides_the_format(activate: Activate) -> None:
    assert planned_format(activate()).name == "sparse_24"
    assert planned_format(activate(on=False)).name == "plain"
    assert weight_format("sparse_24").passes == ("flash_dmoe", "sparsity_24")


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
    activate(str(path))
    w13, w2 = layer()
    converted = SparseWeights().convert(NAME, w13, w2)
    assert converted.w13_mask is not None
    assert torch.equal(expand_24(SparseWeight(converted.w13, converted.w13_mask)), expand_24(prune_24(w13, x)))
    assert converted.w2_mask is not None
    assert torch.equal(expand_24(SparseWeight(converted.w2, converted.w2_mask)), expand_24(prune_24(w2, h)))
    assert not torch.equal(converted.w13, prune_24(w13).values)


@pytest.mark.skipif(not kernels_available()[0], reason=f"compiled kernels: {kernels_available()[1]}")
def test_the_kernel_computes_with_the_pruned_weights(activate: Activate) -> None:
    activate()
    form = SparseWeights()
    assert_computes_with(form, form.convert(NAME, *layer()))


def test_a_layer_that_cannot_be_pruned_stays_and_is_refused(activate: Activate) -> None:
    session = activate()
    w13, w2 = layer()
    w13[0, 0, 0] = float("inf")
    converted = SparseWeights().convert(NAME, w13, w2)
    assert converted.format == "plain"
    assert "pruned" in converted.why_plain
    assert converted.w13 is w13
    assert "expert 0 has" in session.proof.passes["sparsity_24"].why_not


def test_where_it_is_required_that_is_an_error(activate: Activate) -> None:
    activate(required=True)
    w13, w2 = layer()
    w13[0, 0, 0] = float("inf")
    with pytest.raises(RequiredNotAppliedError, match="not finite"):
        SparseWeights().convert(NAME, w13, w2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"in_dtype": torch.float32}, "found torch.float32"),
        ({"intermediate_size_per_partition": 24}, "found 128 and 24"),
    ],
)
def test_layers_that_it_does_not_cover_are_refused(changes: dict[str, Any], why: str) -> None:
    config = {"in_dtype": torch.bfloat16, "hidden_dim": 128, "intermediate_size_per_partition": 32} | changes
    found = SparseWeights().why_not(SimpleNamespace(**config))
    assert why in found
    assert bool(found) == bool(why)


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
