"""Defines claims: numbers of a document, and the values of a record that they round."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "records"
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")
_BRACED = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Claim:
    """A piece of text; the numbers in braces are claimed, in their order."""

    document: str
    text: str
    records: tuple[str, ...]
    values: Callable[..., Sequence[float]]
    """Takes the records, returns what the numbers have to round."""

    def check(self) -> tuple[int, int]:
        """Return where the text stands in the document, [begin, end).

        Raises:
            AssertionError: it does not stand there once, or a number is not what the record says.
        """
        plain = _BRACED.sub(r"\1", self.text)
        content = read(self.document)
        assert content.count(plain) == 1, f"{self.document}: {content.count(plain)} times: {plain}"
        compare(_BRACED.findall(self.text), self.values(*map(record, self.records)), f"{self.document}: {plain}")
        begin = content.index(plain)
        return begin, begin + len(plain)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of which every number right of the labels is claimed."""

    document: str
    header: str
    """Beginning of its first line."""
    after: str
    """Text that the table is the first one after."""
    labels: int
    """Columns on the left that are no measurement."""
    records: tuple[str, ...]
    row: Callable[..., Sequence[float]]
    """Takes the records and the labels of a row, returns its values in order."""

    def check(self) -> tuple[int, int]:
        """Return where the table stands in the document, [begin, end).

        Raises:
            AssertionError: it does not stand there, or a number is not what the record says.
        """
        content = read(self.document)
        assert self.after in content, f"{self.document}: no {self.after!r}"
        begin = content.index(f"\n{self.header}", content.index(self.after)) + 1
        end = content.find("\n\n", begin)
        end = len(content) if end < 0 else end
        found = [record(name) for name in self.records]
        for line in content[begin:end].splitlines()[2:]:
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            shown = [number for cell in cells[self.labels :] for number in NUMBER.findall(cell)]
            compare(shown, self.row(*found, *cells[: self.labels]), f"{self.document}: {line}")
        return begin, end


def compare(shown: Sequence[str], values: Sequence[float], where: str) -> None:
    """Check that each number rounds its value.

    Raises:
        AssertionError: one does not.
    """
    assert len(shown) == len(values), f"{where}: shows {list(shown)}, the record has {list(values)}"
    for text, value in zip(shown, values, strict=True):
        number = float(text.replace(",", ""))
        digits = len(text.partition(".")[2])
        assert abs(number - value) <= 0.5000001 * 10.0**-digits, f"{where}: says {text}, the record {value}"


@functools.cache
def read(document: str) -> str:
    """Return the text of a document."""
    return (ROOT / document).read_text(encoding="utf-8")


@functools.cache
def record(name: str) -> Any:
    """Return a record by its name without ending."""
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def cases(found: Any, **wanted: object) -> Iterator[Any]:
    """Yield the cases of a record of kernels that have these values; `shape` is the layer's name."""
    for case in found["cases"]:
        shape = case["shape"] if isinstance(case["shape"], str) else case["shape"]["name"]
        if all((shape if key == "shape" else case[key]) == value for key, value in wanted.items()):
            yield case
