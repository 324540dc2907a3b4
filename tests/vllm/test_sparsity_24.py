"""2:4 pruned experts in a real server: converted in the worker, smaller, worse, and gone when switched off."""

from __future__ import annotations

import dataclasses
import math

import pytest

from moe_optimizer.proof.record import PassProof
from moe_optimizer.proof.verdict import model_holders
from tests.vllm.conftest import Served
from tests.vllm.flags_and_pruned import Seen, flags_and_pruned
from tests.vllm.heldout import reference_perplexity

BF16_LAYER_BYTES = 16 * 3 * 128 * 128 * 2


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return flags_and_pruned(tmp_path_factory)


@pytest.fixture
def entry(pruned: Seen) -> PassProof:
    (holder,) = model_holders(pruned.info.proofs)
    return holder.passes["sparsity_24"]


def test_every_layer_is_pruned_and_runs(entry: PassProof) -> None:
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert [layer.name for layer in entry.layers] == [f"model.layers.{index}.mlp.experts" for index in range(4)]
    for layer in entry.layers:
        assert (layer.weight_format, layer.weight_dtype, layer.why_plain) == ("sparse_24", "bfloat16", "")
        assert layer.calls > 0
        assert layer.self_check_error is not None


def test_the_experts_take_nine_sixteenths_of_the_memory(entry: PassProof) -> None:
    for layer in entry.layers:
        assert layer.loaded_bytes == BF16_LAYER_BYTES
        assert layer.weight_bytes * 16 == BF16_LAYER_BYTES * 9


def test_the_layers_were_pruned_while_loading(pruned: Seen) -> None:
    (holder,) = model_holders(pruned.info.proofs)
    (patch,) = [each for each in holder.patches if each.target.endswith(":UnquantizedFusedMoEMethod.create_weights")]
    assert (patch.state, patch.detail) == ("applied", "")


def test_the_table_of_the_launcher_shows_it(pruned: Seen) -> None:
    (row,) = [row for row in pruned.info.rows if row.pass_name == "sparsity_24"]
    assert dataclasses.astuple(row)[:5] == ("sparsity_24", "experts 2:4 sparse", "yes", "yes, 4 layers", "")


def test_perplexity_is_worse_and_of_a_model_that_still_speaks(pruned: Seen) -> None:
    dense = reference_perplexity()
    assert math.isfinite(pruned.perplexity)
    # Not pruned it would be within a thousandth of the dense model's; with weights in wrong places, in the hundreds.
    assert 1.05 * dense < pruned.perplexity < 4 * dense, (dense, pruned.perplexity)


def test_off_nothing_of_it_is_there(ours_bf16: Served) -> None:
    for holder in model_holders(ours_bf16.proofs):
        assert "sparsity_24" not in holder.passes
        assert all(layer.weight_format == "plain" for layer in holder.passes["flash_dmoe"].layers)
        assert not any("create_weights" in patch.target for patch in holder.patches)
