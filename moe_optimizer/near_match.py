"""The nearest known word to a mistyped one."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NEAR = 0.65
"""Chosen: one wrong letter of three ("fp9" for "fp8") is near, "nope" is not."""
_SHORTEST_BEGINNING = 3
_SEPARATORS = "-_"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return "did you mean X?" for the nearest of `known`, or None when nothing is near.

    Near is a word of which the other is the beginning ("--gpu" of "--gpus", "--tpot" of "--tpot-ms"), or one that is
    alike without the parts that both begin with: "--enable-nope" has most letters of "--enable-fp8", and means nothing
    of the kind. Of several, one with the same digits comes first: a digit is rarely mistyped, and h100 is another GPU
    than h200.
    """
    # Imported here: only an error pays for it.
    import difflib

    def likeness(one: str, other: str) -> float:
        return difflib.SequenceMatcher(None, one, other).ratio()

    def nearness(each: str) -> tuple[bool, float]:
        return re.findall(r"\d", each) == re.findall(r"\d", word), likeness(word, each)

    near = [each for each in known if _begins(word, each) or likeness(*_without_common_parts(word, each)) >= _NEAR]
    return f"did you mean {max(near, key=nearness)}?" if near else None


def _begins(word: str, known: str) -> bool:
    if len(word.strip(_SEPARATORS)) < _SHORTEST_BEGINNING:
        return False
    return known.startswith(word) or word.startswith(tuple(f"{known}{each}" for each in _SEPARATORS))


def _without_common_parts(one: str, other: str) -> tuple[str, str]:
    ours, theirs = (re.split(f"[{_SEPARATORS}]", text) for text in (one, other))
    while ours and theirs and ours[0] == theirs[0]:
        del ours[0], theirs[0]
    return "-".join(ours), "-".join(theirs)
