"""Experts in four bits in vLLM's engine: every layer converted, the memory of 4.25 bits, a model that still speaks."""

from __future__ import annotations

import dataclasses

import pytest

from moe_optimizer.proof.record import PassProof
from moe_optimizer.proof.verdict import model_holders
from tests.vllm.conftest import FOUR_BITS, Offline, Served
from tests.vllm.heldout import reference_perplexity

BF16_LAYER_BYTES = 16 * 3 * 128 * 128 * 2


@pytest.fixture(params=FOUR_BITS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def converted(offline: dict[str, Offline], name: str) -> Offline:
    """One worker."""
    return offline[name]


@pytest.fixture
def entry(converted: Offline) -> PassProof:
    (holder,) = model_holders(converted.proofs)
    return holder.passes["four_bit"]


def test_every_layer_is_converted_and_runs(entry: PassProof, name: str) -> None:
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert [layer.name for layer in entry.layers] == [f"model.layers.{index}.mlp.experts" for index in range(4)]
    for layer in entry.layers:
        assert (layer.weight_format, layer.weight_dtype, layer.why_plain) == (name, "uint8", "")
        assert layer.calls > 0
        assert layer.self_check_error is not None
        assert layer.output_error is not None
        assert 0.05 < layer.output_error < 0.2


def test_the_experts_take_four_and_a_quarter_of_sixteen_bits(entry: PassProof) -> None:
    for layer in entry.layers:
        assert layer.loaded_bytes == BF16_LAYER_BYTES
        assert layer.weight_bytes * 16 == BF16_LAYER_BYTES * 4.25


def test_the_table_of_the_launcher_shows_it(converted: Offline, name: str) -> None:
    shown = dataclasses.astuple(converted.row("four_bit"))[:5]
    assert shown == ("four_bit", f"experts in {name.upper()}", "yes", "yes, 4 layers", "")


def test_perplexity_is_worse_and_of_a_model_that_still_speaks(converted: Offline) -> None:
    dense = reference_perplexity()
    # Not converted it would be within a thousandth of the dense model's; with weights in wrong places, in the hundreds.
    assert 1.001 * dense < converted.perplexity < 1.2 * dense, (dense, converted.perplexity)


def test_off_nothing_of_it_is_there(ours_bf16: Served) -> None:
    for holder in model_holders(ours_bf16.proofs):
        assert "four_bit" not in holder.passes
