"""What loads tell of the time that an API server takes for a token of other loads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.specs.front_end import FrontEnd, FrontEndTime
from moe_optimizer.specs.quantity import Source

KNOWN = FrontEnd(
    times=(
        FrontEndTime(clients=128, us_per_token=40.0, found="`bench`, 2026-11-28"),
        FrontEndTime(clients=512, us_per_token=67.0, found="`bench`, 2026-11-28"),
    )
)


def us_of(clients: float, known: FrontEnd = KNOWN) -> float | None:
    time = known.of_clients(clients, lambda _: 30.0)
    assert time is None or (time.unit, time.source) == ("us", Source.MEASURED)
    return None if time is None else time.value


@pytest.mark.parametrize(("clients", "us"), [(128, 40.0), (256, 53.5), (512, 67.0), (4096, 67.0)])
def test_loads_tell_of_those_between_them_and_the_last_of_all_above(clients: int, us: float):
    assert us_of(clients) == pytest.approx(us)


def test_below_the_first_load_it_falls_to_what_counts_where_nothing_is_known():
    assert us_of(32) is None
    assert us_of(32.1) == pytest.approx(30.0, rel=1e-3)
    assert us_of(64) == pytest.approx(35.0)
    assert us_of(127.9) == pytest.approx(40.0, rel=1e-3)
    assert us_of(512, FrontEnd()) is None


def test_a_fast_host_comes_to_what_it_takes_from_where_nothing_is_known():
    fast = FrontEnd(times=(FrontEndTime(clients=512, us_per_token=20.0, found=""),))
    assert us_of(128, fast) is None
    assert [us_of(clients, fast) for clients in (128.1, 256, 512, 2048)] == pytest.approx([30, 25, 20, 20], rel=1e-3)


def test_beyond_its_loads_a_host_is_as_much_slower_or_faster_as_under_the_last_one():
    def modelled(clients: float) -> float:
        return 40.0 if clients <= 128 else 60.0

    known = FrontEnd(times=(FrontEndTime(clients=128, us_per_token=50.0, found=""),))
    time = known.of_clients(512, modelled)
    assert time is not None
    assert time.value == pytest.approx(75.0)


@given(st.integers(1, 5000), st.floats(1, 500), st.floats(1, 4096), st.floats(1, 4))
def test_more_clients_never_take_less_for_a_token_by_one_load(known: int, us: float, clients: float, more: float):
    end = FrontEnd(times=(FrontEndTime(clients=known, us_per_token=us, found=""),))
    few, many = (us_of(each, end) or 30.0 for each in (clients, more * clients))
    assert many >= min(few, us) * (1 - 1e-9)


def test_who_found_it_under_which_load_is_said():
    known = KNOWN.of_clients(300, lambda _: 44.0)
    assert known is not None
    assert known.ref == "`bench`, 2026-11-28, 512 clients"
