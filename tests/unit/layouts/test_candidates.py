from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optimizer.layouts.candidates import candidates
from tests.unit.layouts.questions import question


def splits(**asked) -> set[str]:
    return {each.name for each in candidates(question(**asked)) if each.disaggregated}


def of_shape(names: set[str], shape: str) -> set[str]:
    """Return the splits of servers of one shape, without it."""
    return {name.removeprefix(shape) for name in names if name.startswith(f"{shape}p")}


def test_the_servers_that_fill_a_machine_are_divided_in_every_way():
    found = splits(gpus=8)
    assert of_shape(found, "tp2") == {"p1d3", "p2d2", "p3d1"}
    assert of_shape(found, "tp4") == {"p1d1"}
    assert not of_shape(found, "tp8")


def test_over_machines_all_are_alike_or_each_has_servers_of_one_kind():
    found = splits(gpus=8, machines=2)
    assert of_shape(found, "tp8") == {"p1d1"}
    assert of_shape(found, "tp4") == {"p2d2"}
    assert of_shape(found, "tp2") == {"p2d6", "p4d4", "p6d2"}
    # Alike: by threes; of one kind: by fours.
    assert of_shape(splits(gpus=8, machines=3), "tp2") == {"p3d9", "p4d8", "p6d6", "p8d4", "p9d3"}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ((1, 3), {"p1d3"}),
        ((3, 3), {"p3d3"}),
        ((3, None), {"p3d5"}),
        ((None, 3), {"p5d3"}),
        ((1, None), {"p1d7"}),
        ((1, 8), set()),
        ((8, None), set()),
    ],
)
def test_numbers_that_are_asked_for_may_divide_machines_unevenly(asked, found):
    assert of_shape(splits(gpus=8, machines=2, split=asked), "tp2") == found


def test_a_split_has_a_server_on_every_machine():
    assert not splits(gpus=8, machines=4, split=(1, 2))
    assert splits(gpus=8, machines=4, split=(1, 3))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 16),
    st.integers(1, 5),
    st.sampled_from([(None, None), (1, None), (None, 2), (2, 3)]),
    st.sampled_from([None, 1, 2]),
)
def test_no_layout_has_more_gpus_or_servers_than_there_are(count, machines, split, each):
    asked = question(gpus=count, machines=machines, split=split, servers_per_machine=each)
    for layout in candidates(asked):
        assert layout.num_devices <= count * machines
        if not layout.disaggregated:
            assert layout.num_servers <= (each or count) * machines
            continue
        # Dealt as evenly as can be, the fullest machine holds its servers.
        assert -(-layout.num_servers // machines) * layout.devices_of_server <= count
        assert split[0] in (None, layout.prefill_servers)
        assert split[1] in (None, layout.replicas)


@pytest.mark.parametrize("machines", [2, 3, 8])
def test_a_server_over_several_machines_is_not_divided_into_prefill_and_decode(machines):
    divided = [each for each in candidates(question(gpus=4, machines=machines)) if each.disaggregated]
    assert divided
    assert all(each.devices_of_server <= 4 for each in divided)


@pytest.mark.parametrize("machines", [1, 2, 4])
def test_no_layout_is_listed_twice(machines):
    names = [each.name for each in candidates(question(gpus=8, machines=machines))]
    assert len(names) == len(set(names))
