"""What loads tell of the time that an API server takes for a token of other loads."""

from __future__ import annotations

import pytest

from moe_optimizer.specs.front_end import FrontEnd, FrontEndTime
from moe_optimizer.specs.quantity import Source

KNOWN = FrontEnd(
    times=(
        FrontEndTime(clients=128, us_per_token=40.0, found="`bench`, 2026-11-28"),
        FrontEndTime(clients=512, us_per_token=67.0, found="`bench`, 2026-11-28"),
    )
)


@pytest.mark.parametrize(("clients", "us"), [(64, 40.0), (255, 40.0), (256, 67.0), (512, 67.0), (4096, 67.0)])
def test_a_load_tells_of_more_clients_and_down_to_half_of_its_own(clients: int, us: float):
    known = KNOWN.of_clients(clients)
    assert known is not None
    assert (known.value, known.unit, known.source) == (us, "us", Source.MEASURED)


def test_nothing_is_told_of_fewer_clients_than_half_of_those_that_were_measured():
    assert KNOWN.of_clients(63) is None
    assert FrontEnd().of_clients(512) is None


def test_who_found_it_under_which_load_is_said():
    known = KNOWN.of_clients(300)
    assert known is not None
    assert known.ref == "`bench`, 2026-11-28, 512 clients"
