"""The nearest known word to a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return "did you mean X?" for the nearest of `known`, or None when nothing is near."""
    # Imported here: only an error pays for it.
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]}?" if close else None
