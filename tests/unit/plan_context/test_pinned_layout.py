from __future__ import annotations

import pytest

from moe_optimizer.errors import DoesNotFitError, InputError, UnsupportedError
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.layout_table import layout_lines
from moe_optimizer.plan.pass_params import DisaggregationParams
from moe_optimizer.specs.layout import parse_layout
from tests.builders import cpu_machine, gpus, made_plan, mixtral_8x7b, profile_with, tiny_moe
from tests.unit.plan_context.planned_layouts import choice_of, planned, servers_of


def test_a_pinned_layout_is_planned_whatever_the_goal_and_the_profile_say():
    profile = profile_with("conservative")
    plan = planned(profile=profile, layout="tp2x4", clients=1, goal="latency")
    assert choice_of(plan).chosen == "tp2x4"
    assert choice_of(plan).pinned_by
    assert servers_of(plan) == 4
    assert plan.parallelism.tensor_parallel_size == 2


def test_a_pinned_layout_that_misses_a_limit_is_said_to():
    choice = choice_of(planned(layout="tp2x4", clients=64, ttft_ms=10_000.0, tpot_ms=1.0))
    rows = "\n".join(layout_lines(choice, 100)).splitlines()
    (row,) = (row for row in rows if row.strip().startswith("tp2x4"))
    assert "TPOT above" in row
    assert "TTFT above" not in row


def test_prefill_and_decode_apart_can_be_pinned():
    plan = planned(layout="tp2p1d3")
    split = plan.decision("disaggregation").params_as(DisaggregationParams)
    assert (split.prefill_servers, split.decode_servers, plan.parallelism.tensor_parallel_size) == (1, 3, 2)
    assert plan.decision("replicas").status is Status.OFF
    assert plan.num_gpus == 8


@pytest.mark.parametrize("layout", ["tp1p1d1", "tp1p3d2", "tp2p1d2"])
def test_a_pinned_split_may_leave_gpus_over(layout):
    plan = planned(layout=layout)
    assert choice_of(plan).chosen == layout
    assert plan.num_gpus == parse_layout(layout).num_devices


@pytest.mark.parametrize("layout", ["tp8p1d1", "tp4p2d2", "tp4p1d3", "tp2p3d5", "tp2p1d3", "tp1dp4epp3d1"])
def test_a_split_over_several_machines_can_be_pinned(layout):
    plan = planned(num_nodes=2, num_gpus=16, layout=layout)
    assert plan.group is not None
    assert choice_of(plan).chosen == layout
    assert plan.num_gpus == parse_layout(layout).num_devices
    assert (plan.parallelism.replicas, plan.parallelism.pipeline_parallel_size) == (1, 1)


@pytest.mark.parametrize(
    ("layout", "nodes", "why"),
    [
        ("tp8pp2p1d1", 4, "has one machine, here a machine of 8 GPUs"),
        ("tp8p1d1", 3, "each of 3 machines has one of the servers"),
        ("tp3p2d2", 2, "32 attention heads"),
    ],
)
def test_a_split_that_cannot_lie_on_the_machines_says_why(layout, nodes, why):
    with pytest.raises(UnsupportedError, match=f"--layout {layout}: .*{why}"):
        planned(num_nodes=nodes, num_gpus=8 * nodes, layout=layout)


def test_a_split_of_more_servers_than_the_machines_have_room_for_says_how_many_that_is():
    # Four machines of six GPUs have as many GPUs as six servers of four, and room for four.
    with pytest.raises(UnsupportedError, match=r"--layout tp4p3d3: .*a machine of 6 GPUs has room for 1 "):
        planned(6, num_nodes=4, num_gpus=24, layout="tp4p3d3")


def test_copies_with_whole_experts_can_be_pinned():
    plan = planned(layout="tp2dp4ep")
    assert (plan.parallelism.data_parallel_size, plan.parallelism.expert_parallel) == (4, True)
    assert plan.serve_args.value("--data-parallel-size") == "4"


def test_a_pinned_layout_is_not_said_to_follow_from_the_prediction():
    reason = planned(layout="tp2dp4ep").decision("parallelism").reason
    assert reason.endswith("; layout tp2dp4ep, as --layout tp2dp4ep asks")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"layout": "tp16"}, UnsupportedError),
        ({"layout": "tp3"}, UnsupportedError),
        ({"layout": "nonsense"}, InputError),
        ({"layout": "tp4x2", "wishes": resolve_wishes([], ["replicas"])}, InputError),
        ({"layout": "tp8", "wishes": resolve_wishes(["replicas"], [])}, InputError),
        ({"layout": "tp8", "vllm_args": ("--tensor-parallel-size", "4")}, InputError),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_what_to_do(changes, error):
    with pytest.raises(error) as caught:
        planned(**changes)
    assert caught.value.hint


def test_a_pinned_layout_that_does_not_divide_says_what_does_not():
    with pytest.raises(UnsupportedError, match=r"--layout tp3: .*32 attention heads .* 3"):
        planned(layout="tp3")


@pytest.mark.parametrize(
    ("layout", "nodes", "why"),
    [
        ("tp4pp2", 1, r"over 1 x 8 GPUs \(each of the 2 stages of a pipeline has a machine of 8 GPUs\)"),
        ("tp4pp4", 2, r"over 2 x 8 GPUs \(each of the 4 stages of a pipeline has a machine of 8 GPUs\)"),
        ("tp16", 2, r"over 2 x 8 GPUs \(slices of a layer stay in a machine of 8 GPUs\)"),
    ],
)
def test_a_pinned_layout_that_cannot_lie_on_the_machines_says_why(layout, nodes, why):
    with pytest.raises(UnsupportedError, match=f"--layout {layout}: .*{why}"):
        planned(num_nodes=nodes, layout=layout)


@pytest.mark.parametrize(
    ("count", "layout", "hint"),
    [
        (4, "tp4pp2", "--gpus 8"),
        (4, "tp2p1d3", "--gpus 8"),
        (8, "tp4x4", "moe-optimizer plan --gpus 16 --nodes 2"),
        (8, "tp4x3", ""),
        (8, "tp4p1d3", "moe-optimizer plan --gpus 16 --nodes 2"),
        (8, "tp4p1d2", ""),
        (8, "tp8pp2p1d1", ""),
    ],
)
def test_a_pinned_layout_of_more_gpus_than_are_planned_for_says_how_to_get_them(count, layout, hint):
    # Of named machines; one that was found has no more.
    with pytest.raises(UnsupportedError, match=f"--layout {layout}: needs .* found {count}") as caught:
        planned(count, layout=layout)
    assert (caught.value.hint or "").startswith(hint or "leave it out")


@pytest.mark.parametrize("layout", ["tp1", "tp1x2", "tp1p1d1"])
def test_a_pinned_layout_that_does_not_fit_is_refused_and_no_other_is_served(layout):
    with pytest.raises(DoesNotFitError, match=f"--layout {layout}.*93.4 GB") as caught:
        made_plan(mixtral_8x7b(), gpus("h100_sxm", 2), layout=layout)
    assert "2 GPUs" in (caught.value.hint or "")


@pytest.mark.parametrize(("layout", "said"), [("tp1x2", "1 of 2 GPUs of each server"), ("tp2", "2 of 4 GPUs stay")])
def test_gpus_that_a_pinned_layout_leaves_over_are_counted_where_they_lie(layout, said):
    plan = planned(4, layout=layout, clients=64)
    assert any(said in warning for warning in plan.warnings)


def test_on_the_cpu_nothing_is_predicted_and_nothing_can_be_pinned():
    assert made_plan(tiny_moe(), cpu_machine()).layouts is None
    with pytest.raises(UnsupportedError):
        made_plan(tiny_moe(), cpu_machine(), layout="tp1")


@pytest.mark.parametrize(
    ("layout", "hint"),
    [
        ("tp1p1d2", "{disaggregation: {mode: on, prefill_servers: 1, decode_servers: 2}}"),
        ("tp1x2", "{replicas: {mode: on, count: 2}}"),
        ("tp2", None),
    ],
)
def test_a_layout_on_a_cpu_is_refused_with_what_starts_its_servers_there(layout, hint):
    with pytest.raises(UnsupportedError, match="on GPUs") as caught:
        made_plan(tiny_moe(), cpu_machine(), layout=layout)
    assert caught.value.hint == (hint and f"in a profile, passes: {hint} starts these servers")
