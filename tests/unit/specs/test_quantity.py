"""Combining sources keeps the weaker one."""

from __future__ import annotations

import itertools

import pytest

from moe_optimizer.specs.quantity import Quantity, Source


@pytest.mark.parametrize(("left", "right"), list(itertools.product(Source, Source)))
def test_the_weaker_source_wins(left: Source, right: Source) -> None:
    assert (left | right) is (left if left.weakness >= right.weakness else right)
    assert (left | right) is (right | left)


def test_measured_is_strongest_and_assumed_weakest() -> None:
    assert sorted(Source, key=lambda source: source.weakness) == [
        Source.MEASURED, Source.DATASHEET, Source.MODELLED, Source.ASSUMED,
    ]  # fmt: skip


def test_a_quantity_shows_its_source() -> None:
    shown = str(Quantity(4.8e12, "bytes/s", Source.DATASHEET, "H200 SXM datasheet"))
    assert shown == "4.8e+12 bytes/s (datasheet: H200 SXM datasheet)"
