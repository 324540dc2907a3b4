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
)


@given(LAYOUTS)
def test_a_name_is_read_back_as_the_layout(layout):
    assert parse_layout(layout.name) == layout


@pytest.mark.parametrize("text", ["", "tp0", "4", "tp4x", "dp2", "tp2ppx2", "tp2x2pd", "tp2 x2"])
def test_what_is_no_layout_is_an_error_with_an_example(text):
    with pytest.raises(InputError) as caught:
        parse_layout(text)
    assert caught.value.hint is not None


def test_a_split_into_prefill_and_decode_has_two_servers():
    assert parse_layout("tp2pd").num_devices == 4
    assert parse_layout("tp2dp4epx2").num_devices == 16
