"""Matches module names against the lists of names and patterns that quantisation schemes have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate

_TO_LAYERS = re.compile(r"^.*?(?=layers\.)")
_SAFE = re.compile(r"[\w.\\^$*+|()\[\]-]*")
MAX_WILDCARDS = 3
"""More in one pattern are not tried: the pattern comes from a file and must not cost more than it can tell."""
MAX_PATTERNS = 20_000
MAX_SLOW_PATTERNS = 400
"""Patterns that are neither a name nor a name's beginning; beyond this many the rest is left out."""


class ModulePatterns:
    """Tells whether a list names a module of the decoder.

    An entry is a name (it stands for everything below it, wherever it starts in the path), a shell pattern, or a
    regular expression after "re:". What stands before "layers." is cut off on both sides, so that wrappers of the
    language model do not matter.
    """

    def __init__(self, entries: Iterable[object]) -> None:
        self._names: set[str] = set()
        self._beginnings: set[str] = set()
        self._expressions: list[re.Pattern[str]] = []
        self.skipped: list[str] = []
        for entry in list(entries)[:MAX_PATTERNS]:
            if isinstance(entry, str) and entry:
                self._add(entry)

    def __bool__(self) -> bool:
        return bool(self._names or self._beginnings or self._expressions)

    def match(self, name: str) -> bool:
        """Return whether `name` ("layers.3.mlp.up_proj", "lm_head") or something above it is listed."""
        if self._names and any(part in self._names for part in _parts(name)):
            return True
        if self._beginnings and any(name[:end] in self._beginnings for end in range(1, len(name) + 1)):
            return True
        full = f"model.{name}" if name.startswith("layers.") else name
        return any(expression.match(full) or expression.match(name) for expression in self._expressions)

    def _add(self, entry: str) -> None:
        if entry.startswith("re:"):
            self._add_expression(entry[3:])
            return
        short = _TO_LAYERS.sub("", entry)
        if "*" not in short and "?" not in short and "[" not in short:
            self._names.add(short.strip("."))
        elif short.endswith("*") and not set(short[:-1]) & set("*?["):
            self._beginnings.add(short[:-1])
        elif short.count("*") <= MAX_WILDCARDS and len(self._expressions) < MAX_SLOW_PATTERNS:
            # Like a name, a pattern stands for everything below what it matches.
            self._expressions += [re.compile(translate(short)), re.compile(translate(f"{short}.*"))]
        else:
            self.skipped.append(entry)

    def _add_expression(self, text: str) -> None:
        stars = text.count("*") + text.count("+")
        safe = _SAFE.fullmatch(text) and ")*" not in text and ")+" not in text and stars <= MAX_WILDCARDS
        try:
            if not safe or len(self._expressions) >= MAX_SLOW_PATTERNS:
                raise re.error("not tried")
            self._expressions.append(re.compile(text))
        except re.error:
            self.skipped.append(f"re:{text}")


def _parts(name: str) -> Iterable[str]:
    """Every run of whole components of a dotted name."""
    components = name.split(".")
    for start in range(len(components)):
        for end in range(start + 1, len(components) + 1):
            yield ".".join(components[start:end])
