"""The parts of a step against times that others published, and what must hold of them whatever the constants are."""

from __future__ import annotations

import dataclasses

import pytest

from moe_optimizer.layouts.experts import expert_times
from moe_optimizer.layouts.step import ATTENTION, HOST, LAUNCHES, MATRICES, StepModel, Tokens
from moe_optimizer.specs.kernel_speeds import SpeedTables
from moe_optimizer.specs.layout import Layout
from tests.builders import deepseek_v3, expert_load, mixtral_8x7b, qwen3_30b_a3b
from tests.unit.layouts.questions import question

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


def test_a_step_without_a_graph_takes_the_launches_of_its_layers_and_one_with_a_graph_none():
    model = StepModel(question(gpus=4), Layout(tensor_parallel_size=4))
    few, many = model.parts(Tokens(16, 576, 512 - 16, 512)), model.parts(Tokens(16, 576, 512, 512))
    assert LAUNCHES not in few
    assert sum(part.value for part in many.values()) == pytest.approx(2200 * qwen3_30b_a3b().num_layers)
    # A plan has every step captured that only decodes.
    assert LAUNCHES not in model.parts(Tokens(1024, 576))


def test_where_workers_have_processes_of_their_own_the_host_is_hidden():
    asked = question(gpus=2)
    layouts = (Layout(), Layout(data_parallel_size=2, expert_parallel=True), Layout(tensor_parallel_size=2))
    one, copies, slices = (StepModel(asked, layout).parts(Tokens(1, 576))[HOST].value for layout in layouts)
    assert one == copies > 300
    assert slices < 10


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
