from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.errors import InputError
from moe_optimizer.specs.layout import Layout, parse_layout

SIZES = st.integers(1, 64)
LAYOUTS = st.builds(
    Layout,
    tensor_parallel_size=SIZES,
    data_parallel_size=SIZES,
    expert_parallel=st.booleans(),
    pipeline_parallel_size=SIZES,
    replicas=SIZES,
    prefill_servers=st.integers(0, 16),
)


@given(LAYOUTS)
def test_a_name_is_read_back_as_the_layout(layout):
    assert parse_layout(layout.name) == layout


@pytest.mark.parametrize(
    "text", ["", "tp0", "4", "tp4x", "dp2", "tp2ppx2", "tp2pd", "tp2x2p1d1", "tp2p1", "tp2p0d1", "tp2 x2"]
)
def test_what_is_no_layout_is_an_error_with_an_example(text):
    with pytest.raises(InputError) as caught:
        parse_layout(text)
    assert caught.value.hint is not None


def test_a_layout_has_the_gpus_of_all_its_servers():
    assert parse_layout("tp2p1d3").num_devices == 8
    assert parse_layout("tp2dp4epx2").num_devices == 16


def test_only_the_servers_that_write_answers_count_as_engines():
    split = parse_layout("tp2dp2ep" + "p1d3")
    assert (split.disaggregated, split.num_servers, split.num_engines) == (True, 4, 6)
    assert not parse_layout("tp2x3").disaggregated


def test_whoever_writes_the_former_name_of_a_split_sees_the_one_that_is_read():
    with pytest.raises(InputError) as caught:
        parse_layout("tp2pd")
    assert "pNdN" in str(caught.value)
    assert "tp2p1d3" in (caught.value.hint or "")
