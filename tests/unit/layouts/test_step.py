"""The parts of a step against times that others published, and what must hold of them whatever the constants are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.costs.step_size import StepRule
from moe_optimizer.layouts.constants import LEDGER, PROMPT_LEDGER
from moe_optimizer.layouts.experts import expert_times
from moe_optimizer.layouts.serving import step_tokens
from moe_optimizer.layouts.step import ATTENTION, EXCHANGE, EXPERTS, HOST, LAUNCHES, MATRICES, StepModel, Tokens
from moe_optimizer.specs.kernel_speeds import SpeedTables, TokenSpeeds
from moe_optimizer.specs.layout import Layout, parse_layout
from moe_optimizer.specs.links import Links, LinkTimes
from moe_optimizer.specs.quantity import Source
from tests.builders import deepseek_v3, expert_load, gpt_oss_120b, mixtral_8x7b, qwen3_30b_a3b, qwen3_30b_a3b_fp8
from tests.unit.layouts.questions import TABLES, question

ROOT = Path(__file__).parents[3]
ATTENTION_US = [
    ("h100_sxm", 1, 64, 512, 39.3),
    ("h100_sxm", 1, 256, 1024, 196.3),
    ("h100_sxm", 1, 32, 4096, 99.3),
    ("h100_sxm", 4, 512, 256, 53.0),
    ("h200", 1, 128, 2048, 139.9),
    ("h200", 2, 64, 4096, 76.4),
]
"""GPU, slices of 4 heads of cached keys, sequences, context, us of a layer: published in AIConfigurator 0.12 for vLLM
0.24, attention of one token with 8 query heads for each, 128 wide, in BF16."""


@pytest.mark.parametrize(("hardware", "slices", "sequences", "context", "us"), ATTENTION_US)
def test_attention_of_one_token_takes_what_others_published(hardware, slices, sequences, context, us):
    layout = Layout(tensor_parallel_size=slices)
    model = StepModel(question(gpus=slices, hardware=hardware), layout)
    found = model.parts(Tokens(sequences, context))[ATTENTION].value / qwen3_30b_a3b().num_layers
    assert found == pytest.approx(us, rel=0.16)


def attention_us(heads: int, sequences: int) -> float:
    model = deepseek_v3()
    narrow = dataclasses.replace(model, attention=dataclasses.replace(model.attention, num_heads=heads))
    asked = question(narrow, gpus=8, hardware="h200", expert_bits=8, linear_bits=8)
    return StepModel(asked, Layout()).parts(Tokens(sequences, 8192))[ATTENTION].value


def test_latent_attention_of_many_heads_is_bound_by_operations_and_of_few_by_bytes():
    assert attention_us(32, 128) == pytest.approx(attention_us(16, 128))
    assert attention_us(128, 128) > 1.1 * attention_us(16, 128)


def test_what_all_slices_of_latent_attention_multiply_is_not_divided():
    prompt = Tokens(0, 0, 8192, 1024)
    asked = question(deepseek_v3(), gpus=8, hardware="h200", expert_bits=8, linear_bits=8)
    one, eight = (StepModel(asked, Layout(tensor_parallel_size=size)).parts(prompt)[MATRICES].value for size in (1, 8))
    assert one / 8 < eight < one / 2


def test_a_slice_of_part_of_a_tile_takes_the_time_of_the_tile():
    asked = question(gpus=8, speeds=SpeedTables())
    sizes = {slices: expert_times(asked, Layout(tensor_parallel_size=slices)) for slices in (4, 6, 8)}
    # Widths of 192, 128 and 96: the last one is one tile of 64 and a half.
    assert sizes[8].layer_us(64).value == pytest.approx(sizes[6].layer_us(64).value, rel=0.02)
    assert sizes[6].layer_us(64).value < 0.9 * sizes[4].layer_us(64).value


def test_a_modelled_division_of_experts_is_scaled_to_a_measured_one_of_the_same_layer():
    asked = question(mixtral_8x7b(), gpus=2)
    slices, experts = (expert_times(asked, Layout(tensor_parallel_size=2, expert_parallel=ep)) for ep in (False, True))
    assert slices.table is not None
    assert experts.table is None
    # Every expert is hit, so both read as many bytes: what one was measured to take more than modelled, both do.
    even = dataclasses.replace(experts, imbalance=1.0, num_ranks=1)
    assert even.layer_us(64).value == pytest.approx(slices.layer_us(64).value, rel=0.02)


def test_slices_that_were_not_measured_are_scaled_to_those_that_are_next_in_width():
    """gpt-oss's experts whole and in halves are in the tables of the H200, quarters are not."""

    def quarters_us(*widths: int) -> float:
        tables = (each for each in TABLES.tables if each.shape.intermediate_size in widths)
        asked = question(
            gpt_oss_120b(), gpus=4, hardware="h200", weights="mxfp4", expert_bits=4.25,
            speeds=SpeedTables(tables=tuple(tables)),
        )  # fmt: skip
        times = expert_times(asked, Layout(tensor_parallel_size=4))
        assert times.table is None
        return times.layer_us(512).value

    assert quarters_us(2880, 1440) == quarters_us(1440) != quarters_us(2880)


def test_a_table_of_slices_as_vllm_fills_them_up_is_that_of_the_layout():
    half = next(each for each in TABLES.tables if (each.weights, each.shape.intermediate_size) == ("mxfp4", 1440))
    quarter = dataclasses.replace(half, shape=dataclasses.replace(half.shape, intermediate_size=736))
    asked = question(
        gpt_oss_120b(), gpus=4, hardware="h200", weights="mxfp4", expert_bits=4.25,
        speeds=SpeedTables(tables=(quarter,)),
    )  # fmt: skip
    assert expert_times(asked, Layout(tensor_parallel_size=4)).table == quarter


PUBLISHED_US = {64: 511, 320: 832, 384: 846, 768: 741}
"""Tokens -> us of Mixtral's experts, half of them whole on an H100, with balanced routing: AIConfigurator 0.12."""


def test_large_whole_experts_are_read_again_for_each_block_of_rows_that_vllm_does_not_group():
    asked = question(mixtral_8x7b(), gpus=2, even_routing=True)
    experts = expert_times(asked, Layout(tensor_parallel_size=2, expert_parallel=True))
    for tokens, us in PUBLISHED_US.items():
        assert experts.layer_us(tokens).value == pytest.approx(us, rel=0.16)
    # 768 tokens are grouped, and take less than 512.
    assert experts.layer_us(768).value < experts.layer_us(512).value
    ours = dataclasses.replace(experts, ours=True)
    assert ours.layer_us(768).value > ours.layer_us(512).value


def test_a_step_without_a_graph_takes_the_launches_of_its_layers_and_one_with_a_graph_none():
    model = StepModel(question(gpus=4), Layout(tensor_parallel_size=4))
    few, many = model.parts(Tokens(16, 576, 512 - 16, 512)), model.parts(Tokens(16, 576, 512, 512))
    assert LAUNCHES not in few
    assert sum(part.value for part in many.values()) == pytest.approx(2200 * qwen3_30b_a3b().num_layers)
    # Graphs end at twice the requests that may run at once.
    narrow = StepModel(question(gpus=4, max_running=64), Layout(tensor_parallel_size=4))
    assert LAUNCHES not in narrow.parts(Tokens(0, 0, 128, 512))
    assert LAUNCHES in narrow.parts(Tokens(0, 0, 256, 512))
    # A plan has every step captured that only decodes.
    assert LAUNCHES not in model.parts(Tokens(1024, 576))


def test_latent_attention_takes_more_launches_for_each_layer_of_a_prompt():
    plain, latent = (StepModel(question(model, gpus=1), Layout()) for model in (qwen3_30b_a3b(), deepseek_v3()))
    of_a_layer = [model.launches_us / model.question.model.num_layers for model in (plain, latent)]
    assert of_a_layer[1] > 2 * of_a_layer[0]


def test_graphs_of_prompts_leave_no_launches():
    model = StepModel(question(gpus=4, prompt_graphs=True), Layout(tensor_parallel_size=4))
    prompt = Tokens(16, 576, 512, 512)
    assert LAUNCHES not in model.parts(prompt)
    assert model.step_us(prompt) == model.graph_us(prompt) < model.launches_us


@pytest.mark.parametrize("ours", [False, True])
def test_experts_with_even_routing_take_what_the_ledger_of_a_server_has(ours):
    sides = json.loads((ROOT / LEDGER).read_text(encoding="utf-8"))["sides"]
    asked = question(gpus=1, even_routing=True, our_kernels=ours)
    for ledger in sides["ours" if ours else "stock"]["ledgers"]:
        (measured,) = (row["us"] for row in ledger["rows"] if row["group"] == "experts")
        found = StepModel(asked, Layout()).parts(Tokens(ledger["batch"], ledger["context"]))[EXPERTS].value
        assert found == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize(
    ("weights", "bits", "most", "tokens"), [("bf16", 16, 16_384, 8192), ("mxfp4", 4.25, 8192, 8192)]
)
def test_steps_end_where_our_table_does_unless_ours_alone_read_the_experts(weights, bits, most, tokens):
    # The tables end at 8,192 and 4,096 tokens.
    ours = {"weights": weights, "expert_bits": bits, "our_kernels": True, "steps": StepRule(most=most)}
    assert step_tokens(question(gpus=1, **ours), Layout()) == tokens


@pytest.mark.parametrize("prompt", [512, 1024, 2048, 4096, 8192])
def test_a_step_that_reads_a_prompt_takes_what_its_ledger_has(prompt):
    record = json.loads((ROOT / PROMPT_LEDGER).read_text(encoding="utf-8"))["prompts"][str(prompt)]
    parts = StepModel(question(gpus=1, even_routing=True), Layout()).parts(Tokens(0, 0, prompt, prompt))
    for name in (EXPERTS, MATRICES, ATTENTION):
        assert parts[name].value == pytest.approx(record["groups"][name]["us"], rel=0.1, abs=250)
    # Kernels, not what waits for their launch or for the host.
    kernels = sum(part.value for name, part in parts.items() if name not in (LAUNCHES, HOST))
    assert kernels == pytest.approx(record["kernels_us"], rel=0.11)
    assert (LAUNCHES in parts) == (prompt in (1024, 2048))


def test_products_in_fp8_quantise_their_input_but_not_the_routers():
    bf16, fp8 = (StepModel(question(gpus=1, linear_bits=bits), Layout()).parts(Tokens(1, 576)) for bits in (16, 8))
    # Half of what is not a call are bytes of the products, the rest the head's.
    read = 0.5 * (bf16[MATRICES].value - 2.9 * 193) * 0.72
    assert fp8[MATRICES].value - bf16[MATRICES].value + read == pytest.approx(1.5 * 2 * 48, rel=0.15)


def test_scales_of_blocks_are_a_kernel_for_each_product_and_scales_of_channels_are_not():
    by_block, by_channel = (
        StepModel(question(model, gpus=1, linear_bits=8), Layout()).parts(Tokens(1, 576))[MATRICES].value
        for model in (qwen3_30b_a3b_fp8(), qwen3_30b_a3b())
    )
    assert by_block - by_channel == pytest.approx((3.0 - 1.5) * 2 * 48, rel=0.01)


@pytest.mark.parametrize(
    ("tokens", "layout", "saved"),
    [
        (8, Layout(), True),
        (9, Layout(), False),
        (1, Layout(replicas=2), True),
        (1, Layout(tensor_parallel_size=2), False),
    ],
)
def test_one_launch_for_gate_and_choice_is_of_few_tokens_on_one_gpu(tokens, layout, saved):
    with_launch, without = (
        StepModel(question(gpus=2, our_kernels=True, fused_router_tokens=few), layout).step_us(Tokens(tokens, 576))
        for few in (8, 0)
    )
    assert without - with_launch == pytest.approx(4.4 * 48 * saved)


def test_one_launch_for_gate_and_choice_is_not_counted_with_vllms_experts():
    asked = question(gpus=1, our_kernels=False, fused_router_tokens=8)
    assert StepModel(asked, Layout()).step_us(Tokens(1, 576)) == StepModel(question(gpus=1), Layout()).step_us(
        Tokens(1, 576)
    )


def test_above_the_table_vllms_kernel_computes_but_not_on_weights_that_only_ours_read():
    asked = question(gpus=1, our_kernels=True)
    eight, four = (
        dataclasses.replace(asked, expert_bits=bits, weights=weights)
        for bits, weights in ((16, "bf16"), (4.25, "mxfp4"))
    )
    for each, jumps in ((eight, True), (four, False)):
        times = expert_times(each, Layout())
        assert times.table is not None
        last = times.table.rows[-1].tokens
        assert (times.layer_us(last + 1).value > 1.2 * times.layer_us(last).value) is jumps


def four_bits_us(tokens: int, row: TokenSpeeds, **fields: Any) -> float:
    """Return what a layer of Qwen3-30B-A3B takes by a table of one row, as experts that ours alone read."""
    whole = next(each for each in TABLES.tables if each.weights == "mxfp4" and "H100" in each.device)
    table = dataclasses.replace(whole, rows=(dataclasses.replace(row, tokens=tokens),))
    asked = question(
        gpus=1, weights="mxfp4", expert_bits=4.25, our_kernels=True, speeds=SpeedTables(tables=(table,)), **fields
    )
    return expert_times(asked, Layout()).layer_us(tokens).value


@pytest.mark.parametrize(("rounded", "us"), [(False, 70.0), (True, 60.0)])
def test_of_four_bits_no_kernel_counts_that_does_not_run(rounded, us):
    """vLLM's cannot read the weights, and those that round activations are for profiles that allow it."""
    ours = {"grouped-mxfp4_weights-n64": 70.0, "grouped-mxfp4-n64": 60.0}
    row = TokenSpeeds(tokens=1, stock_us=50.0, ours_us=ours)
    assert four_bits_us(1024, row, rounded_activations=rounded) == us


@pytest.mark.parametrize(("stock_us", "us"), [(75.0, 70.0), (50.0, 50.0)])
def test_experts_that_vllm_repacks_are_ours_where_ours_are_never_slower(stock_us, us):
    row = TokenSpeeds(tokens=1, stock_us=stock_us, ours_us={"direct": 70.0})
    assert four_bits_us(1, row, ours_where_never_slower=True) == us


def test_traffic_of_unknown_routing_reads_fewer_experts_than_even_routing():
    even, real = (expert_times(question(gpus=1, even_routing=each), Layout()) for each in (True, False))
    assert real.layer_us(16).value < 0.95 * even.layer_us(16).value
    # With many tokens all experts are read in any routing.
    assert real.layer_us(512).value == pytest.approx(even.layer_us(512).value, rel=0.05)


@pytest.mark.parametrize("last", [256, 1024])
def test_a_table_that_ends_early_is_continued_by_the_model(last):
    asked = question(gpus=1)
    cut = [
        dataclasses.replace(each, rows=tuple(row for row in each.rows if row.tokens <= last)) for each in TABLES.tables
    ]
    whole, early = (
        expert_times(dataclasses.replace(asked, speeds=SpeedTables(tables=tuple(tables))), Layout())
        for tables in (TABLES.tables, cut)
    )
    assert early.layer_us(last) == whole.layer_us(last)
    for tokens in (2048, 8192):
        found = early.layer_us(tokens)
        assert found.value == pytest.approx(whole.layer_us(tokens).value, rel=0.3)
        assert found.source is Source.MODELLED


@pytest.mark.parametrize(
    ("layout", "tokens", "source"),
    [
        ("tp1", 64, Source.MEASURED),
        ("tp1", 65, Source.MEASURED),
        ("tp1", 1e6, Source.MODELLED),
        ("tp2ep", 64, Source.MODELLED),
    ],
    ids=["a row", "between rows", "after the last", "the busiest of two"],
)
def test_experts_are_measured_where_a_table_has_them(layout, tokens, source):
    asked = question(gpus=2)
    part = StepModel(asked, parse_layout(layout)).parts(Tokens(sequences=tokens, context=100))[EXPERTS]
    assert part.source is source
    assert "benchmarks/records" in part.ref


def test_what_gpus_exchange_is_measured_where_their_links_are():
    asked = question(gpus=2)
    times = {2**12: 100.0, 2**26: 100.0}
    table = LinkTimes(
        device=asked.gpu.name, num_devices=2, versions="", all_reduce_us=times, gather_us=times, source="here"
    )
    measured = dataclasses.replace(asked, links=Links(tables=(table,)))
    tokens = Tokens(sequences=64, context=100)
    for name, count in (("tp2", 2 * asked.model.num_layers), ("tp1dp2ep", 2 * asked.model.num_moe_layers)):
        layout = parse_layout(name)
        modelled, found = (StepModel(each, layout).parts(tokens)[EXCHANGE] for each in (asked, measured))
        assert modelled.source is Source.MODELLED
        assert (found.value, found.source) == (pytest.approx(100.0 * count), Source.MEASURED)


def test_experts_that_a_measured_load_does_not_use_are_not_read():
    model = mixtral_8x7b()
    tokens = tuple(int(expert < model.top_k) for expert in range(model.num_experts))
    load = expert_load(model)
    one_route = dataclasses.replace(
        load, layers=tuple(dataclasses.replace(each, tokens=tokens) for each in load.layers)
    )
    even, same = (
        expert_times(question(model, gpus=1, speeds=SpeedTables(), load=each), Layout()).layer_us(16).value
        for each in (None, one_route)
    )
    # Two of eight experts are read.
    assert same < 0.4 * even
