"""Combining sources keeps the weaker one; sizes in words."""

from __future__ import annotations

import itertools

import pytest

from moe_optimizer.specs.quantity import Quantity, Source, bytes_in_words, number_of


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
    assert shown.startswith("4.8e+12 bytes/s (datasheet: ")


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (4.48e6, "4.48 MB"), (61.1e9, "61.1 GB"), (999.6e9, "1 TB"), (2e15, "2000 TB")],
)
def test_a_size_has_three_digits_and_its_unit(count: float, words: str) -> None:
    assert bytes_in_words(count) == words


def test_one_is_not_many():
    assert [number_of(count, "request") for count in (0, 1, 2)] == ["0 requests", "1 request", "2 requests"]
