from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optimizer.layouts.candidates import candidates
from tests.unit.layouts.questions import question


def splits(**asked) -> set[str]:
    return {each.name for each in candidates(question(**asked)) if each.disaggregated}


def test_the_servers_that_fill_a_machine_are_divided_in_every_way():
    found = splits(gpus=8)
    assert {name for name in found if name.startswith("tp2p")} == {"tp2p1d3", "tp2p2d2", "tp2p3d1"}
    assert {name for name in found if name.startswith("tp4p")} == {"tp4p1d1"}
    assert not any(name.startswith("tp8") for name in found)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 16), st.sampled_from([None, 2, 3, 16]), st.sampled_from([None, 1, 2]))
def test_no_layout_has_more_gpus_or_servers_than_there_are(count, most, each):
    asked = question(gpus=count, servers_of_split=most, servers_per_machine=each)
    for layout in candidates(asked):
        assert layout.num_devices <= count
        assert layout.num_servers <= ((most if layout.disaggregated else each) or count)


@pytest.mark.parametrize("machines", [2, 8])
def test_over_several_machines_nothing_is_divided_into_prefill_and_decode(machines):
    assert not splits(gpus=8, machines=machines)


def test_no_layout_is_listed_twice():
    names = [each.name for each in candidates(question(gpus=8))]
    assert len(names) == len(set(names))
