"""What an API server takes for a token, by how many clients it answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.layouts.constants import FRONT_END_TOKEN_US
from moe_optimizer.layouts.front_end import modelled_token_us, token_us
from moe_optimizer.specs.front_end import FrontEnd, FrontEndTime
from moe_optimizer.specs.quantity import Source

(FEW, FEW_US), (MANY, MANY_US) = FRONT_END_TOKEN_US
NOTHING = FrontEnd()


def test_as_modelled_it_grows_with_the_logarithm_of_the_clients_between_two_numbers_of_them():
    between = modelled_token_us((FEW * MANY) ** 0.5)
    assert between == pytest.approx((FEW_US + MANY_US) / 2)
    assert [modelled_token_us(clients) for clients in (1, FEW, MANY, 8 * MANY)] == [FEW_US, FEW_US, MANY_US, MANY_US]


@given(st.floats(0.01, 1e5), st.floats(1, 100), st.floats(1, 25), st.integers(1, 5000))
def test_more_clients_take_no_less_for_a_token_where_a_slow_host_is_known_too(clients, more, slower, known):
    time = FrontEndTime(clients=known, us_per_token=slower * modelled_token_us(known), found="a test")
    for end in (NOTHING, FrontEnd(times=(time,))):
        assert token_us(end, more * clients).value >= token_us(end, clients).value * (1 - 1e-9)


@given(st.floats(1, 5000), st.floats(0.2, 5), st.integers(1, 5000))
def test_what_is_known_of_a_host_brings_no_jump(clients, ratio, known):
    end = FrontEnd(times=(FrontEndTime(clients=known, us_per_token=ratio * modelled_token_us(known), found="a test"),))
    assert token_us(end, 1.001 * clients).value == pytest.approx(token_us(end, clients).value, rel=0.01)


def test_what_the_machine_told_counts_in_place_of_the_model():
    known = FrontEnd(times=(FrontEndTime(clients=MANY, us_per_token=88.0, found="a test"),))
    assert (token_us(known, MANY).value, token_us(known, MANY).source) == (88.0, Source.MEASURED)
    assert (token_us(NOTHING, MANY).value, token_us(NOTHING, MANY).source) == (MANY_US, Source.MODELLED)
    # A quarter of its clients it tells nothing of.
    assert token_us(known, MANY / 4).source is Source.MODELLED
