"""2:4 pruned experts in a real server: converted in the worker, smaller, worse, and gone when switched off."""

from __future__ import annotations

import dataclasses
import math

import pytest

from moe_optimizer.launcher.launch import running
from moe_optimizer.plan.decision import Wish
from moe_optimizer.proof.record import PassProof
from moe_optimizer.proof.verdict import model_holders
from tests.vllm.conftest import READY_TIMEOUT_S, Served, ask, plan_here
from tests.vllm.heldout import heldout_perplexity, reference_perplexity

pytestmark = pytest.mark.vllm
BF16_LAYER_BYTES = 16 * 3 * 128 * 128 * 2


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, float]:
    """One worker, pruned by magnitude alone; and its perplexity on the held-out text."""
    plan = plan_here(
        "--enforce-eager",
        wishes={"sparsity_24": (Wish.ON, "test")},
        required=frozenset({"sparsity_24"}),
        dtype="bfloat16",
        max_model_len=520,
    )
    with running(plan, run_dir=tmp_path_factory.mktemp("sparse"), ready_timeout_s=READY_TIMEOUT_S) as info:
        return Served(ask(info.base_url), info.proofs, info.run_dir, info), heldout_perplexity(info)


@pytest.fixture
def entry(pruned: tuple[Served, float]) -> PassProof:
    (holder,) = model_holders(pruned[0].proofs)
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


def test_the_layers_were_pruned_while_loading(pruned: tuple[Served, float]) -> None:
    (holder,) = model_holders(pruned[0].proofs)
    (patch,) = [each for each in holder.patches if each.target.endswith(":UnquantizedFusedMoEMethod.create_weights")]
    assert (patch.state, patch.detail) == ("applied", "")


def test_the_table_of_the_launcher_shows_it(pruned: tuple[Served, float]) -> None:
    assert pruned[0].info is not None
    (row,) = [row for row in pruned[0].info.rows if row.pass_name == "sparsity_24"]
    assert dataclasses.astuple(row) == ("sparsity_24", "experts 2:4 sparse", "yes", "yes, 4 layers", "")


def test_perplexity_is_worse_and_of_a_model_that_still_speaks(pruned: tuple[Served, float]) -> None:
    dense = reference_perplexity()
    assert math.isfinite(pruned[1])
    # Not pruned it would be within a thousandth of the dense model's; with weights in wrong places, in the hundreds.
    assert 1.05 * dense < pruned[1] < 4 * dense, (dense, pruned[1])


def test_off_nothing_of_it_is_there(ours_bf16: Served) -> None:
    for holder in model_holders(ours_bf16.proofs):
        assert "sparsity_24" not in holder.passes
        assert all(layer.weight_format == "plain" for layer in holder.passes["flash_dmoe"].layers)
        assert not any("create_weights" in patch.target for patch in holder.patches)
