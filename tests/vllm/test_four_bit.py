"""Experts in four bits on a real server: every layer converted, the memory of 4.25 bits, a model that still speaks."""

from __future__ import annotations

import dataclasses

import pytest

from moe_optimizer.launcher.launch import running
from moe_optimizer.plan.decision import Wish
from moe_optimizer.proof.record import PassProof
from moe_optimizer.proof.verdict import model_holders
from tests.builders import profile_with
from tests.vllm.conftest import READY_TIMEOUT_S, Served, ask, plan_here
from tests.vllm.heldout import heldout_perplexity, reference_perplexity

pytestmark = pytest.mark.vllm
BF16_LAYER_BYTES = 16 * 3 * 128 * 128 * 2


# Two servers: the formats have kernels, converters and ops of their own. Both have 4.25 bits.
@pytest.fixture(scope="module", params=[("mxfp4", 32), ("int4", 64)], ids=["mxfp4", "int4"])
def format_and_group(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory, format_and_group: tuple[str, int]) -> tuple[Served, float]:
    """One worker."""
    name, group = format_and_group
    plan = plan_here(
        "--enforce-eager",
        profile=profile_with("balanced", {"four_bit": {"format": name, "group": group}}),
        wishes={"four_bit": (Wish.ON, "test")}, required=frozenset({"four_bit"}), dtype="bfloat16", max_model_len=520,
    )  # fmt: skip
    run_dir = tmp_path_factory.mktemp("four_bits")
    with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
        return Served(ask(info.base_url), info.proofs, info.run_dir, info), heldout_perplexity(info)


@pytest.fixture
def entry(four_bits: tuple[Served, float]) -> PassProof:
    (holder,) = model_holders(four_bits[0].proofs)
    return holder.passes["four_bit"]


def test_every_layer_is_converted_and_runs(entry: PassProof, format_and_group: tuple[str, int]) -> None:
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert [layer.name for layer in entry.layers] == [f"model.layers.{index}.mlp.experts" for index in range(4)]
    for layer in entry.layers:
        assert (layer.weight_format, layer.weight_dtype, layer.why_plain) == (format_and_group[0], "uint8", "")
        assert layer.calls > 0
        assert layer.self_check_error is not None
        assert layer.output_error is not None
        assert 0.05 < layer.output_error < 0.2


def test_the_experts_take_four_and_a_quarter_of_sixteen_bits(entry: PassProof) -> None:
    for layer in entry.layers:
        assert layer.loaded_bytes == BF16_LAYER_BYTES
        assert layer.weight_bytes * 16 == BF16_LAYER_BYTES * 4.25


def test_the_table_of_the_launcher_shows_it(four_bits: tuple[Served, float], format_and_group: tuple[str, int]) -> None:
    assert four_bits[0].info is not None
    (row,) = [row for row in four_bits[0].info.rows if row.pass_name == "four_bit"]
    assert dataclasses.astuple(row)[:5] == (
        "four_bit",
        f"experts in {format_and_group[0].upper()}",
        "yes",
        "yes, 4 layers",
        "",
    )


def test_perplexity_is_worse_and_of_a_model_that_still_speaks(four_bits: tuple[Served, float]) -> None:
    dense = reference_perplexity()
    # Not converted it would be within a thousandth of the dense model's; with weights in wrong places, in the hundreds.
    assert 1.001 * dense < four_bits[1] < 1.2 * dense, (dense, four_bits[1])


def test_off_nothing_of_it_is_there(ours_bf16: Served) -> None:
    for holder in model_holders(ours_bf16.proofs):
        assert "four_bit" not in holder.passes
