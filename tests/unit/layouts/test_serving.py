"""Prefill and decode apart: what a prediction says of P servers that read prompts and D that write answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optimizer.costs.comm import send_us
from moe_optimizer.costs.memory import kv_bytes_per_token
from moe_optimizer.layouts.serving import Prediction, memory_of, predict
from moe_optimizer.specs.layout import Layout, parse_layout
from tests.builders import mixtral_8x7b, qwen3_30b_a3b
from tests.unit.layouts.questions import question

_QUANTISED = 0.05
"""The time to first token follows a number of steps, which is whole: fewer prompts in fewer, fuller steps may wait
longer for one of them."""
_BY_CHANCE = 0.02
"""More servers are filled less evenly, and steps are whole."""
LOADS = st.fixed_dictionaries(
    {
        "model": st.sampled_from([qwen3_30b_a3b(), mixtral_8x7b()]),
        "clients": st.sampled_from([1, 7, 64, 500, 3000]),
        "input_tokens": st.sampled_from([128, 1024, 4096]),
        "output_tokens": st.sampled_from([64, 512]),
    }
)
SERVERS, TENSOR = st.integers(1, 7), st.sampled_from([1, 2])
MACHINES = st.sampled_from([1, 2])


def predicted(layout: Layout, machines: int = 1, **load) -> Prediction:
    asked = question(gpus=16, machines=machines, hardware="h200", **load)
    memory = memory_of(asked, layout)
    assert memory.fits
    return predict(asked, layout, memory)


def split(tensor: int, prefill: int, decode: int) -> Layout:
    return Layout(tensor_parallel_size=tensor, prefill_servers=prefill, replicas=decode)


ONE_OF_EACH = {
    ("tp1p1d1", 64, 512, 128): (17.3540, 456.072, 3079.66),
    ("tp2p1d1", 7, 4096, 64): (5.9223, 352.928, 617.05),
    ("tp2p1d1", 500, 128, 1024): (29.8289, 769.777, 16365.79),
    ("tp4epp1d1", 64, 128, 1024): (7.4461, 280.728, 8297.66),
    ("tp1dp2epp1d1", 500, 512, 128): (19.3624, 1089.848, 18033.90),
    ("tp1p1d1", 3000, 128, 1024): (61.4400, 125653.016, 16296.55),
}
"""Layout, clients, prompt and answer -> TPOT and TTFT in ms and tokens/s, as they were predicted when there was one
server of each kind only. Steps of the fifth have more tokens than its table, which the model has continued since; of
the three with most clients an API server takes longer for each token since."""


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_one_server_of_each_kind_is_predicted_as_before_there_could_be_more(case):
    name, clients, prompt, answer = case
    found = predicted(parse_layout(name), clients=clients, input_tokens=prompt, output_tokens=answer)
    assert (found.tpot_ms, found.ttft_ms, found.tokens_per_s) == pytest.approx(ONE_OF_EACH[case], rel=1e-4)


AICONFIGURATOR = {
    ("tp1p1d3", 64, 1024, 512): (13.53, 4497),
    ("tp1p1d3", 256, 1024, 512): (21.50, 11060),
    ("tp1p2d2", 256, 1024, 512): (23.36, 10103),
    ("tp1p2d2", 256, 4096, 64): (31.81, 1883),
}
"""The same -> TPOT in ms and tokens/s that AIConfigurator 0.12 estimates for Qwen3-30B-A3B in BF16 on H200, with eight
prompts in a prefill step. Of the last one reading is the bound."""


@pytest.mark.parametrize("case", AICONFIGURATOR)
def test_splits_are_predicted_within_15_percent_of_aiconfigurator(case):
    name, clients, prompt, answer = case
    load = {"clients": clients, "input_tokens": prompt, "output_tokens": answer, "prompt_graphs": True}
    found = predicted(parse_layout(name), **load)
    assert (found.tpot_ms, found.tokens_per_s) == pytest.approx(AICONFIGURATOR[case], rel=0.15)


def test_over_several_machines_the_cache_of_a_prompt_crosses_the_network():
    load = {"clients": 1, "input_tokens": 4096, "output_tokens": 64}
    within, across = (predicted(split(2, 1, 1), machines, **load) for machines in (1, 2))
    asked = question(gpus=16, machines=2, hardware="h200", **load)
    sent = 4096 * kv_bytes_per_token(asked.memory)
    longer_us = (
        send_us(sent, asked.gpu, across_machines=True).value - send_us(sent, asked.gpu, across_machines=False).value
    )
    assert longer_us > 1000
    assert 1e3 * (across.ttft_ms - within.ttft_ms) == pytest.approx(longer_us)
    assert across.tpot_ms == within.tpot_ms


@settings(max_examples=60, deadline=None)
@given(LOADS, TENSOR, SERVERS, SERVERS)
def test_a_split_is_never_predicted_better_over_machines_than_in_one(load, tensor, prefill, decode):
    within, across = (predicted(split(tensor, prefill, decode), machines, **load) for machines in (1, 2))
    assert across.tpot_ms == within.tpot_ms
    assert across.ttft_ms >= within.ttft_ms
    assert across.tokens_per_s <= within.tokens_per_s


@settings(max_examples=60, deadline=None)
@given(LOADS, TENSOR, SERVERS, SERVERS, MACHINES)
def test_more_prefill_servers_never_make_first_tokens_later(load, tensor, prefill, decode, machines):
    few, more = (predicted(split(tensor, count, decode), machines, **load) for count in (prefill, prefill + 1))
    assert more.ttft_ms <= few.ttft_ms * (1 + _QUANTISED)
    assert more.tpot_ms == few.tpot_ms
    assert more.tokens_per_s >= few.tokens_per_s * (1 - _BY_CHANCE)


@settings(max_examples=60, deadline=None)
@given(LOADS, TENSOR, SERVERS, SERVERS, MACHINES)
def test_more_decode_servers_never_make_tokens_later_or_fewer(load, tensor, prefill, decode, machines):
    few, more = (predicted(split(tensor, prefill, count), machines, **load) for count in (decode, decode + 1))
    assert more.tpot_ms <= few.tpot_ms * (1 + _BY_CHANCE)
    assert more.tokens_per_s >= few.tokens_per_s * (1 - _BY_CHANCE)
    assert more.running <= few.running
    assert more.waiting <= few.waiting


def test_where_reading_is_the_bound_twice_the_prefill_servers_answer_twice_as_much():
    load = {"clients": 500, "input_tokens": 4096, "output_tokens": 64}
    one, two, four = (predicted(split(1, count, 8), **load).tokens_per_s for count in (1, 2, 4))
    assert two == pytest.approx(2 * one, rel=0.02)
    assert four == pytest.approx(4 * one, rel=0.02)


@settings(max_examples=60, deadline=None)
@given(LOADS, TENSOR, SERVERS, SERVERS)
def test_every_client_of_a_split_is_read_is_answered_or_waits(load, tensor, prefill, decode):
    found = predicted(split(tensor, prefill, decode), **load)
    request_s = (found.ttft_ms + (load["output_tokens"] - 1) * found.tpot_ms) / 1e3
    # Little's law. Engines share clients in whole numbers.
    clients = found.tokens_per_s / load["output_tokens"] * request_s
    assert clients == pytest.approx(load["clients"], rel=0.05, abs=decode)


def test_prefill_servers_that_cannot_keep_up_make_first_tokens_late():
    load = {"clients": 500, "input_tokens": 4096, "output_tokens": 64}
    slow, quick = (predicted(split(1, count, 8), **load) for count in (1, 24))
    assert slow.reading_share > 1 > quick.reading_share
    assert slow.ttft_ms > 10 * quick.ttft_ms


def test_where_the_cache_is_full_more_decode_servers_have_room_for_those_that_wait():
    load = {"clients": 3000, "input_tokens": 1024, "output_tokens": 512}
    one, two = (predicted(split(1, 4, count), **load) for count in (1, 2))
    assert one.running == two.running
    assert two.waiting < one.waiting / 2 + 1
