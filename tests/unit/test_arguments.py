"""What `Arguments` refuse, and how they say it."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import Field

from moe_optimizer.arguments import Arguments
from moe_optimizer.errors import InputError


class Shelf(Arguments):
    """An example."""

    boards: int = Field(default=3, ge=1)
    """Boards, the lowest included."""
    wood: Literal["oak", "pine"] = "oak"
    labels: list[str] = Field(default_factory=list)
    owner: str


@pytest.mark.parametrize(
    ("values", "said", "hint"),
    [
        ({"boards": 0}, "boards: got 0, expected greater than or equal to 1", "Boards, the lowest included."),
        ({"boards": "3"}, "boards: got '3', expected a valid integer", "Boards, the lowest included."),
        ({"wood": "ash"}, "wood: got 'ash', expected 'oak' or 'pine'", None),
        ({"labels": ["a", 2]}, "labels.1: got 2, expected a valid string", None),
        ({"bords": 2}, "got the unknown argument 'bords'", "did you mean boards?"),
    ],
    ids=str,
)
def test_a_value_is_refused_with_what_got_and_expected(values: dict[str, Any], said: str, hint: str | None) -> None:
    given: dict[str, Any] = {"owner": "me", **values}
    with pytest.raises(InputError) as refused:
        Shelf(**given)
    assert str(refused.value).startswith(said)
    assert refused.value.hint == hint


def test_what_is_missing_is_named() -> None:
    with pytest.raises(InputError, match="owner: got none"):
        Shelf()  # pyrefly: ignore[missing-argument]
