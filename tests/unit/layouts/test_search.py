from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.inspection.hardware_catalog import load_catalog_entry
from moe_optimizer.layouts.constants import FRONT_END_BUSY, MOST_API_SERVERS
from moe_optimizer.layouts.front_end import modelled_token_us
from moe_optimizer.layouts.question import LayoutQuestion
from moe_optimizer.layouts.search import Limits, ordered, rank, why_behind
from moe_optimizer.layouts.serving import FRONT_END, Prediction, memory_of, predict
from moe_optimizer.specs.front_end import FrontEnd, FrontEndTime
from moe_optimizer.specs.kernel_speeds import SpeedTables
from moe_optimizer.specs.layout import Layout
from tests.builders import deepseek_v3, expert_load, mixtral_8x7b, qwen3_30b_a3b
from tests.unit.layouts.questions import by_itself, question

MODELS = st.sampled_from([qwen3_30b_a3b(), mixtral_8x7b()])
GPUS, CLIENTS = st.integers(1, 16), st.sampled_from([1, 7, 64, 500])


def as_counted(prediction: Prediction) -> float:
    """Return tokens/s, of copies what they count as: they must be 5 % better than others to be taken."""
    return prediction.tokens_per_s / (1.05 if prediction.layout.data_parallel_size > 1 else 1.0)


@settings(max_examples=50, deadline=None)
@given(
    MODELS, GPUS, st.integers(1, 4096), st.none() | st.floats(4, 120), st.none() | st.floats(50, 5000), st.booleans()
)
def test_more_gpus_never_predict_less_throughput_at_equal_limits(model, count, clients, tpot_ms, ttft_ms, more):
    limits = Limits(tpot_ms=tpot_ms, ttft_ms=ttft_ms)
    found = [
        rank(question(model, gpus=n, clients=clients, more_api_servers=more), "throughput", limits).within
        for n in (count, count + 1)
    ]
    if found[0]:
        assert found[1]
    # Prefill and decode apart come last, however fast: with one GPU more another layout may keep the limits.
    if found[0] and not found[0][0].layout.disaggregated:
        # Differences of a hundredth count as none.
        assert as_counted(found[1][0]) >= 0.985 * as_counted(found[0][0])


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([qwen3_30b_a3b(), deepseek_v3()]), GPUS, CLIENTS, st.sampled_from(["l4", "h100_sxm", "h200"]))
def test_a_layout_that_does_not_fit_is_never_among_the_answers(model, count, clients, hardware):
    asked = question(model, gpus=count, clients=clients, hardware=hardware)
    ranking = rank(asked, "throughput", Limits())
    assert all(memory_of(asked, each.layout).fits for each in (*ranking.within, *ranking.beyond))
    assert not any(memory_of(asked, each).fits for each in ranking.do_not_fit)
    assert all(each.layout.num_devices <= count for each in (*ranking.within, *ranking.beyond))


@settings(max_examples=20, deadline=None)
@given(MODELS, st.sampled_from([1, 2, 4, 8]), CLIENTS, st.floats(1.01, 4))
def test_a_faster_memory_or_link_never_makes_a_layout_slower(model, count, clients, factor):
    # Without tables, whose times are of the GPU as it is.
    asked = question(model, gpus=count, clients=clients, speeds=SpeedTables())
    gpu = asked.gpu
    links = {name: _scaled(fact, factor) if fact.unit == "bytes/s" else fact for name, fact in gpu.collectives.items()}
    for faster in (
        dataclasses.replace(gpu, memory_bandwidth=_scaled(gpu.memory_bandwidth, factor)),
        dataclasses.replace(gpu, collectives=links),
    ):
        for each in rank(asked, "latency", Limits()).within:
            again = predict(dataclasses.replace(asked, gpu=faster), each.layout, each.memory)
            assert again.tpot_ms <= each.tpot_ms * (1 + 1e-9)


def _scaled(fact, factor):
    return dataclasses.replace(fact, value=fact.value * factor)


def test_equal_questions_have_equal_answers():
    first, second = (rank(question(gpus=8, machines=8, clients=300), "balanced", Limits()) for _ in range(2))
    assert [each.layout for each in first.within] == [each.layout for each in second.within]
    assert first.within[0] == second.within[0]


def test_with_a_limit_the_nearest_layouts_come_first_among_those_that_miss_it():
    asked = question(gpus=8, clients=256)
    free = rank(asked, "latency", Limits())
    least = free.within[0].tpot_ms
    none = rank(asked, "throughput", Limits(tpot_ms=least / 2))
    assert not none.within
    assert none.beyond[0].tpot_ms == min(each.tpot_ms for each in none.beyond)
    some = rank(asked, "throughput", Limits(tpot_ms=least * 1.05))
    assert some.within
    assert all(each.tpot_ms <= least * 1.05 for each in some.within)


def test_one_client_gets_slices_and_a_thousand_get_several_servers_or_copies():
    one = rank(question(gpus=8, clients=1), "latency", Limits()).within[0].layout
    many = rank(question(gpus=8, clients=1024), "throughput", Limits()).within[0].layout
    assert one.tensor_parallel_size == 8
    assert many.replicas * many.data_parallel_size > 1


AICONFIGURATOR = {
    64: {"tp8": 7116, "tp4x2": 7044, "tp2x4": 6870, "tp1x8": 5764},
    256: {"tp8": 15964, "tp4x2": 18352, "tp2x4": 15850, "tp1x8": 11478},
    1024: {"tp8": 15763, "tp4x2": 35205, "tp2x4": 38835, "tp1x8": 31287, "tp1dp4epx2": 32962},
}
"""Clients -> layout -> tokens/s that AIConfigurator 0.12 estimates for Qwen3-30B-A3B in BF16 on 8 H100."""


@pytest.mark.parametrize("clients", AICONFIGURATOR)
def test_the_choice_has_95_percent_of_the_best_tokens_per_s_by_aiconfigurator(clients):
    # As plans ask: with graphs of prompts.
    asked = question(gpus=8, clients=clients, input_tokens=1024, output_tokens=512, prompt_graphs=True)
    chosen = rank(asked, "throughput", Limits(), allowed=by_itself).within[0].layout.name
    known = AICONFIGURATOR[clients]
    assert chosen in known
    assert known[chosen] >= 0.95 * max(known.values())


@pytest.mark.parametrize("machines", [1, 2])
def test_prefill_and_decode_apart_come_after_everything_else(machines):
    within = rank(question(gpus=8, machines=machines, clients=256), "balanced", Limits()).within
    apart = [each.layout.disaggregated for each in within]
    assert True in apart
    assert apart == sorted(apart)


def test_a_model_that_no_machine_holds_is_divided_over_several():
    asked = question(deepseek_v3(), gpus=8, machines=2, clients=64, expert_bits=8, linear_bits=8)
    layouts = [each.layout for each in rank(asked, "throughput", Limits()).within]
    assert layouts
    assert all(layout.devices_of_server > 8 for layout in layouts)


def test_of_servers_over_machines_all_that_fit_are_ranked():
    asked = question(deepseek_v3(), gpus=8, machines=2, clients=64, expert_bits=8, linear_bits=8)
    found = {each.layout.name for each in rank(asked, "throughput", Limits()).within}
    assert {"tp8pp2", "tp1dp16ep", "tp8dp2ep"} <= found


def test_prefill_and_decode_servers_that_do_not_fit_a_machine_are_not_taken_over_several():
    asked = question(deepseek_v3(), gpus=8, machines=2, clients=64, expert_bits=8, linear_bits=8)
    found = rank(asked, "throughput", Limits(), allowed=lambda each: each.disaggregated)
    assert not found.within
    assert {each.name for each in found.do_not_fit} >= {"tp8p1d1", "tp4p2d2"}


def test_limits_that_fewer_servers_keep_leave_gpus_unused():
    asked = question(gpus=4, clients=1500)
    all_four = next(each for each in rank(asked, "throughput", Limits()).within if each.layout.name == "tp1x4")
    three = predict(asked, Layout(replicas=3), memory_of(asked, Layout(replicas=3)))
    assert three.tpot_ms < all_four.tpot_ms
    assert three.waiting > all_four.waiting
    limits = Limits(tpot_ms=(three.tpot_ms + all_four.tpot_ms) / 2)
    found = rank(asked, "throughput", limits)
    assert "tp1x3" in {each.layout.name for each in found.within}
    assert "tp1x4" in {each.layout.name for each in found.beyond}


def test_servers_of_two_machines_leave_the_third_one_over_and_as_many_are_taken_as_there_is_room_for():
    asked = question(deepseek_v3(), gpus=8, machines=3, clients=64, expert_bits=8, linear_bits=8)
    three = rank(asked, "throughput", Limits()).within
    assert {each.layout.num_devices for each in three} == {16, 24}
    seven = rank(dataclasses.replace(asked, num_machines=7), "throughput", Limits()).within
    (pairs,) = (each for each in seven if each.layout.name.startswith("tp8pp2"))
    assert pairs.layout.replicas == 3


@settings(max_examples=20, deadline=None)
@given(
    MODELS, st.sampled_from([2, 8]), st.integers(1, 7), st.integers(1, 5), st.sampled_from([64, 500, 2048]),
    st.sampled_from([512, 4096]),
)  # fmt: skip
def test_more_machines_never_predict_less_throughput(model, gpus, machines, more, clients, prompt):
    load = {"clients": clients, "input_tokens": prompt, "output_tokens": 512}
    fewer, several = (
        rank(question(model, gpus=gpus, machines=count, **load), "throughput", Limits(), allowed=by_itself).within
        for count in (machines, machines + more)
    )
    if fewer:
        assert as_counted(several[0]) >= 0.985 * as_counted(fewer[0])


@pytest.mark.parametrize(("clients", "taken"), [(256, False), (512, True)])
def test_a_pipeline_over_machines_is_looked_at_where_not_nearly_all_clients_find_room_in_one(clients, taken):
    load = {"clients": clients, "input_tokens": 2048, "output_tokens": 512}
    found = rank(question(mixtral_8x7b(), gpus=2, machines=2, **load), "throughput", Limits(), allowed=by_itself).within
    assert (found[0].layout.name == "tp2pp2") is taken
    whole = next(each for each in found if not each.over_machines)
    # Half of them do find room, so no tokens are exchanged over the network.
    assert whole.waiting <= whole.running
    assert not any(each.over_machines and each.layout.data_parallel_size > 1 for each in found)
    assert any(each.over_machines for each in found) is taken


def test_a_model_that_a_machine_holds_is_not_served_over_the_network():
    within = rank(question(gpus=8, machines=4, clients=64), "throughput", Limits()).within
    assert all(each.layout.devices_of_server <= 8 for each in within)


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_a_skewed_load_makes_the_step_of_whole_experts_longer(skew):
    model = deepseek_v3()
    asked = question(model, gpus=8, machines=64, clients=16384, hardware="h200", expert_bits=8, linear_bits=8)
    layout = Layout(tensor_parallel_size=1, data_parallel_size=8, expert_parallel=True, replicas=64)
    loaded = dataclasses.replace(asked, load=expert_load(model, skew=skew))
    even = dataclasses.replace(asked, even_routing=True)
    steps = [predict(each, layout, memory_of(each, layout)).tpot_ms for each in (even, loaded)]
    if skew:
        assert steps[1] > 1.05 * steps[0]
    else:
        assert steps[1] == pytest.approx(steps[0], rel=0.03)


def test_our_kernels_take_no_layout_with_copies_whose_speed_with_them_nobody_measured():
    asked = question(gpus=8, clients=1024, input_tokens=1024, output_tokens=512)
    chosen = [
        rank(dataclasses.replace(asked, our_kernels=ours), "throughput", Limits(), allowed=by_itself).within[0].layout
        for ours in (False, True)
    ]
    assert [layout.data_parallel_size for layout in chosen] == [1, 1]


def test_clients_beyond_the_cache_wait_and_the_first_token_comes_later():
    asked = question(gpus=1, clients=1000)
    crowded = rank(asked, "throughput", Limits()).within[0]
    roomy = rank(dataclasses.replace(asked, clients=64), "throughput", Limits()).within[0]
    assert crowded.waiting > 0
    assert crowded.running + crowded.waiting == 1000
    assert roomy.waiting == 0
    assert crowded.ttft_ms > 10 * roomy.ttft_ms


def test_recurrent_state_that_is_no_room_for_all_requests_leaves_room_for_some():
    hybrid = dataclasses.replace(qwen3_30b_a3b(), state_bytes_per_sequence=100_000_000)
    found = rank(question(hybrid, gpus=1, clients=256), "throughput", Limits()).within[0]
    cache = found.memory.kv_cache_bytes
    assert found.running == cache // (100_000_000 + (512 + 64) * 98304) > 50


def test_requests_that_lose_their_room_to_the_answers_of_others_are_read_again():
    asked = question(gpus=1, clients=256)
    crowded = rank(asked, "throughput", Limits()).within[0]
    larger = dataclasses.replace(asked.memory, device_bytes=2 * asked.memory.device_bytes)
    roomy = dataclasses.replace(asked, clients=crowded.running, memory=larger)
    assert crowded.tpot_ms > 1.02 * rank(roomy, "throughput", Limits()).within[0].tpot_ms


def test_the_question_of_a_gpu_without_a_bandwidth_is_refused():
    gpu = load_catalog_entry("h100_sxm").gpu
    unknown = dataclasses.replace(gpu, memory_bandwidth=dataclasses.replace(gpu.memory_bandwidth, value=0.0))
    asked: LayoutQuestion = dataclasses.replace(question(gpus=1), gpu=unknown)
    with pytest.raises(UnsupportedError, match="bandwidth"):
        rank(asked, "latency", Limits())


def test_what_is_within_a_hundredth_of_the_best_goes_by_plainness_wherever_the_best_lies():
    found = rank(question(gpus=2, clients=64), "throughput", Limits(), allowed=by_itself).within
    slices, experts = (next(each for each in found if each.layout.name == name) for name in ("tp2", "tp2ep"))
    for best in (4000.0, 4020.0, 4040.0, 4060.0, 4079.0):
        near = [dataclasses.replace(experts, tokens_per_s=best), dataclasses.replace(slices, tokens_per_s=best / 1.009)]
        assert [each.layout.name for each in ordered(near, "throughput")] == ["tp2", "tp2ep"]
        far = [near[0], dataclasses.replace(slices, tokens_per_s=best / 1.02)]
        assert [each.layout.name for each in ordered(far, "throughput")] == ["tp2ep", "tp2"]


@settings(max_examples=25, deadline=None)
@given(MODELS, st.sampled_from([4, 8]), CLIENTS, st.sampled_from(["latency", "balanced", "throughput"]))
def test_copies_are_taken_only_where_they_bring_more_than_the_model_is_wrong(model, count, clients, goal):
    found = rank(question(model, gpus=count, clients=clients), goal, Limits(), allowed=by_itself).within
    for each in (each for each in found if each.layout.data_parallel_size > 1):
        plain = next(one for one in found if one.layout.data_parallel_size == 1)
        for factor, taken in ((1.03, False), (1.07, True)):
            rate, wait = plain.tokens_per_s * factor, plain.tpot_ms / factor
            near = dataclasses.replace(each, tokens_per_s=rate, tpot_ms=wait, waiting=0)
            if goal == "balanced":
                near = dataclasses.replace(near, tpot_ms=plain.tpot_ms)
            first = ordered([plain, near], goal)[0]
            assert (first is near) is taken
            assert "later first tokens" in why_behind(near, plain, goal)


def test_for_latency_copies_over_machines_are_taken_only_where_they_bring_more_still():
    asked = question(deepseek_v3(), gpus=8, machines=2, clients=256)
    found = rank(asked, "latency", Limits(), allowed=by_itself).within
    stages, copies = (next(each for each in found if each.layout.name == name) for name in ("tp8pp2", "tp1dp16ep"))
    for factor, taken in ((1.08, False), (1.12, True)):
        near = dataclasses.replace(copies, tpot_ms=stages.tpot_ms / factor)
        assert (ordered([stages, near], "latency")[0] is near) is taken
        assert "over machines" in why_behind(near, stages, "latency")


def test_long_reading_is_not_all_before_the_first_token():
    short, long = (question(gpus=1, hardware="h200", clients=64, input_tokens=tokens) for tokens in (512, 8192))
    each = [rank(asked, "throughput", Limits()).within[0] for asked in (short, long)]
    assert each[1].ttft_ms < 6 * each[0].ttft_ms
    assert each[1].tpot_ms > 3 * each[0].tpot_ms


def test_for_latency_prefill_servers_that_keep_up_go_before_fewer_that_do_not():
    asked = question(gpus=8, hardware="h200", clients=64, input_tokens=4096, output_tokens=128)
    splits = rank(asked, "latency", Limits(), allowed=lambda each: each.name.startswith("tp1p")).within
    assert splits[0].reading_share <= 1.05
    (slow,) = (each for each in splits if each.layout.prefill_servers == 1)
    assert slow.tpot_ms < splits[0].tpot_ms
    assert "to be read" in why_behind(slow, splits[0], "latency")


@pytest.mark.parametrize("load", [(80, 4096, 128), (256, 1024, 128)])
def test_for_latency_no_split_is_taken_that_another_beats_in_everything(load):
    clients, prompt, answer = load
    asked = question(
        gpus=8, clients=clients, input_tokens=prompt, output_tokens=answer, prompt_graphs=True, more_api_servers=True
    )
    found = rank(asked, "latency", Limits(), allowed=lambda each: each.disaggregated).within
    assert any(each.reading_share > 1.05 for each in found)
    assert not [
        each.layout.name
        for each in found
        if each.tpot_ms < 0.98 * found[0].tpot_ms
        and each.ttft_ms < found[0].ttft_ms
        and each.tokens_per_s > found[0].tokens_per_s
    ]


@pytest.mark.parametrize("splits", [True, False])
def test_for_latency_what_answers_most_is_taken_where_requests_wait_in_every_layout(splits):
    asked = question(gpus=8, clients=2048, input_tokens=16000, output_tokens=200)
    found = rank(asked, "latency", Limits(), allowed=lambda each: each.disaggregated is splits).within
    assert all(each.waiting > each.running or each.reading_share > 1.05 for each in found)
    assert found[0].tokens_per_s > 0.98 * max(each.tokens_per_s for each in found)
    sooner = min(found, key=lambda each: each.tpot_ms)
    assert sooner.ttft_ms > found[0].ttft_ms
    assert "more requests wait" in why_behind(sooner, found[0], "latency")


@pytest.mark.parametrize(("waiting", "first"), [(3, "tp2"), (10, "tp1x2")])
def test_for_latency_a_few_that_wait_for_room_do_not_count_and_many_do(waiting, first):
    found = rank(question(gpus=2, clients=100), "latency", Limits(), allowed=by_itself).within
    slices, whole = (next(each for each in found if each.layout.name == name) for name in ("tp2", "tp1x2"))
    crowded = dataclasses.replace(slices, waiting=waiting, running=100 - waiting, tpot_ms=0.9 * whole.tpot_ms)
    assert ordered([whole, crowded], "latency")[0].layout.name == first


def test_requests_that_are_dealt_to_servers_find_more_beside_them_than_their_share():
    one, four = (question(gpus=gpus, clients=16 * gpus) for gpus in (1, 4))
    alone = rank(one, "throughput", Limits()).within[0]
    dealt = predict(four, Layout(replicas=4), memory_of(four, Layout(replicas=4)))
    assert 1 < dealt.tpot_ms / alone.tpot_ms < 1.1
    single = [
        predict(dataclasses.replace(asked, clients=1), each.layout, each.memory)
        for asked, each in ((one, alone), (four, dealt))
    ]
    assert single[0].tpot_ms == pytest.approx(single[1].tpot_ms)


def with_front_ends(layout: Layout, **changes: Any) -> Prediction:
    asked = question(gpus=8, hardware="h200", clients=1024, **changes)
    return predict(asked, layout, memory_of(asked, layout))


def taking(us: float, clients: int = 1) -> FrontEnd:
    """Return API servers that were found to take so long for a token of so many clients."""
    return FrontEnd(times=(FrontEndTime(clients=clients, us_per_token=us, found="a test"),))


def test_one_process_that_sends_tokens_out_bounds_slices_before_copies_that_have_one_each():
    slices, copies = Layout(tensor_parallel_size=8), Layout(data_parallel_size=8, expert_parallel=True)
    one = {layout: with_front_ends(layout) for layout in (slices, copies)}
    none = {layout: with_front_ends(layout, processes=False) for layout in (slices, copies)}
    assert one[slices].tokens_per_s < 0.85 * none[slices].tokens_per_s
    assert one[slices].front_end_share == 1
    assert one[copies].tokens_per_s > 0.95 * none[copies].tokens_per_s
    # What tokens wait for is a part of the step, and only there.
    parts = one[slices].parts
    assert parts[FRONT_END].value > 0.4 * sum(part.value for part in parts.values())
    assert FRONT_END not in one[copies].parts


def test_tokens_wait_longer_for_a_slower_api_server():
    layout = Layout(tensor_parallel_size=8)
    known = [taking(slower * modelled_token_us(1024), clients=1024) for slower in (1, 2)]
    rates = [with_front_ends(layout, front_end=each).tokens_per_s for each in known]
    assert rates[0] == with_front_ends(layout).tokens_per_s
    # Requests are taken in as fast as by the other.
    assert rates[1] < 0.66 * rates[0]


def test_what_an_api_server_takes_of_many_clients_counts_where_each_answers_as_many():
    slices, replicas = Layout(tensor_parallel_size=8), Layout(replicas=8)
    few = taking(88.0, clients=1200)
    assert with_front_ends(slices, front_end=few).tokens_per_s < with_front_ends(slices).tokens_per_s
    for layout, changes in ((slices, {"api_servers": 4}), (replicas, {})):
        told, untold = (with_front_ends(layout, **found, **changes) for found in ({"front_end": few}, {}))
        assert (told.tokens_per_s, told.tpot_ms) == (untold.tokens_per_s, untold.tpot_ms)


@given(us=st.floats(1, 1000), more=st.floats(1, 10), clients=st.integers(1, 2048))
@settings(max_examples=25)
def test_a_slower_api_server_never_gives_more_tokens_per_second(us, more, clients):
    for layout in (Layout(tensor_parallel_size=8), Layout(tensor_parallel_size=2, replicas=4)):
        fast, slow = (with_front_ends(layout, front_end=taking(each, clients=clients)) for each in (us, more * us))
        assert slow.tokens_per_s <= fast.tokens_per_s * (1 + 1e-9)


@given(tensor=st.sampled_from([2, 4, 8]), clients=st.integers(1, 2048), hardware=st.sampled_from(["h100_sxm", "h200"]))
@settings(max_examples=30)
def test_a_plan_starts_the_fewest_api_servers_that_are_not_too_busy(tensor, clients, hardware):
    layout = Layout(tensor_parallel_size=tensor)
    asked = question(gpus=8, hardware=hardware, clients=clients, more_api_servers=True)

    def busy(count: int | None) -> Prediction:
        return predict(dataclasses.replace(asked, api_servers=count), layout, memory_of(asked, layout))

    planned = busy(None)
    assert planned.api_servers == MOST_API_SERVERS or planned.front_end_share <= FRONT_END_BUSY
    assert planned.api_servers == 1 or busy(planned.api_servers - 1).front_end_share > FRONT_END_BUSY
    assert (planned.own_front_end_share > FRONT_END_BUSY) == (planned.api_servers > 1)


@pytest.mark.parametrize("layout", [Layout(tensor_parallel_size=8), Layout(data_parallel_size=8, expert_parallel=True)])
def test_more_api_servers_never_make_a_layout_slower_and_change_little_for_few_clients(layout):
    rates = [with_front_ends(layout, api_servers=count).tokens_per_s for count in (8, 16, 32)]
    assert rates == sorted(rates)
    asked = question(gpus=8, hardware="h200", clients=8)
    few = [
        predict(dataclasses.replace(asked, api_servers=count), layout, memory_of(asked, layout)).tokens_per_s
        for count in (layout.data_parallel_size, 8 * layout.data_parallel_size)
    ]
    assert few[0] == pytest.approx(few[1], rel=0.02)


def test_requests_that_come_all_at_once_wait_for_the_reading_of_each_other_and_write_faster():
    layout = Layout(tensor_parallel_size=2)
    asked = question(mixtral_8x7b(), gpus=2, clients=512, api_servers=4)
    loop, burst = (
        predict(dataclasses.replace(asked, rounds=rounds), layout, memory_of(asked, layout)) for rounds in (None, 1)
    )
    assert burst.ttft_ms > 3 * loop.ttft_ms
    assert burst.tpot_ms < 0.8 * loop.tpot_ms


def test_the_more_rounds_the_less_of_the_first_ones_burst_is_in_the_mean():
    layout = Layout()
    asked = question(gpus=1, clients=128)
    found = [
        predict(dataclasses.replace(asked, rounds=rounds), layout, memory_of(asked, layout))
        for rounds in (1, 2, 8, None)
    ]
    waits, writes = [each.ttft_ms for each in found], [each.tpot_ms for each in found]
    assert waits == sorted(waits, reverse=True)
    assert writes == sorted(writes)
    assert waits[-1] < 0.8 * waits[0]


def test_the_front_end_bounds_how_fast_many_short_prompts_are_read_and_long_ones_hardly():
    layout = Layout(tensor_parallel_size=8)
    times: dict[tuple[int, int], float] = {}
    for tokens in (512, 8192):
        asked = question(gpus=8, hardware="h200", clients=256, input_tokens=tokens, rounds=1, prompt_graphs=True)
        for servers in (1, 8):
            several = dataclasses.replace(asked, api_servers=servers)
            times[tokens, servers] = predict(several, layout, memory_of(asked, layout)).ttft_ms
    assert times[512, 1] > 1.1 * times[512, 8]
    assert times[8192, 1] == pytest.approx(times[8192, 8], rel=0.02)


def test_a_step_reads_the_prompts_that_came_in_during_the_one_before():
    layout = Layout(tensor_parallel_size=8)
    asked = question(gpus=8, hardware="h200", clients=16, input_tokens=512, rounds=1, prompt_graphs=True)
    slow, fast = (
        predict(dataclasses.replace(asked, api_servers=count), layout, memory_of(asked, layout)) for count in (1, 8)
    )
    # All 15 others would have room in one step; in two, those of the first wait for the second while they write.
    assert slow.front_end_share < 0.5
    assert slow.tpot_ms > 1.03 * fast.tpot_ms


def test_the_one_process_that_reads_all_answers_bounds_a_load_test_however_many_servers_there_are():
    layout = Layout(tensor_parallel_size=2, replicas=4)
    asked = question(gpus=8, hardware="h200", clients=512)
    users, test = (
        predict(dataclasses.replace(asked, reader_token_us=each), layout, memory_of(asked, layout))
        for each in (0.0, 35.0)
    )
    assert users.tpot_ms < 17 < test.tpot_ms


def test_what_is_read_before_a_requests_first_token_does_not_slow_its_answer():
    # All come at once and the second step reads all but one, so one of 16 writes while others are read.
    layout = Layout()
    asked = question(gpus=1, clients=16, rounds=1)
    found = predict(asked, layout, memory_of(asked, layout))
    decoding_ms = sum(part.value for part in found.parts.values()) / 1e3
    assert decoding_ms < found.tpot_ms < 1.02 * decoding_ms
