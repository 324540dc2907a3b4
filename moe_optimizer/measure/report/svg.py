"""Builds SVG pictures that are light or dark as their reader is, and say in words what they show.

A picture in a page takes its colours from the page's style sheet; one in a file of its own brings the sheet along.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree as ET

_SHEET = Path(__file__).with_name("picture.css")


def style_sheet() -> str:
    """Return the style sheet of all pictures."""
    return _SHEET.read_text(encoding="utf-8")


class Picture:
    """An SVG element with a title and a description, in a coordinate system of `width` x `height`."""

    def __init__(self, width: float, height: float, *, title: str, description: str) -> None:
        self.width = width
        self.height = height
        # Equal in every run, and another for every picture that says something else.
        number = zlib.crc32(f"{title} {description}".encode())
        self._root = ET.Element(
            "svg",
            {
                "viewBox": f"0 0 {_text(width)} {_text(height)}",
                "class": "picture",
                "role": "img",
                "aria-labelledby": f"picture-{number}-title picture-{number}-text",
            },
        )
        ET.SubElement(self._root, "title", {"id": f"picture-{number}-title"}).text = title
        ET.SubElement(self._root, "desc", {"id": f"picture-{number}-text"}).text = description
        self.text(0, 15, title, kind="heading")

    def line(self, points: Iterable[tuple[float, float]], *, kind: str) -> None:
        """Draw straight lines from point to point."""
        self._add("polyline", kind, points=" ".join(f"{_text(x)},{_text(y)}" for x, y in points))

    def rectangle(self, x: float, y: float, width: float, height: float, *, kind: str, says: str = "") -> None:
        """Draw a filled rectangle."""
        self._add(
            "rect", kind, says=says, x=_text(x), y=_text(y), width=_text(max(width, 0)), height=_text(max(height, 0))
        )

    def path(self, commands: str, *, kind: str, says: str = "", fill: str | None = None) -> None:
        """Draw the shape that SVG's path commands describe."""
        self._add("path", kind, says=says, d=commands, **({} if fill is None else {"fill": fill}))

    def marker(self, x: float, y: float, number: int, *, says: str) -> None:
        """Draw the mark of a series: each has a shape of its own, so that no colour has to be told apart."""
        shapes = (
            "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0",
            "M-4,-4h8v8h-8z",
            "M0,-5.5L5.5,0L0,5.5L-5.5,0z",
            "M0,-5.5L5,4H-5z",
        )
        self._add(
            "path",
            f"mark series-{number}",
            says=says,
            d=shapes[number % len(shapes)],
            transform=f"translate({_text(x)},{_text(y)})",
        )

    def text(self, x: float, y: float, words: str, *, kind: str = "label", anchor: str = "start") -> None:
        """Write one line whose base line begins, ends or has its middle at a point."""
        self._add("text", kind, x=_text(x), y=_text(y), **{"text-anchor": anchor}).text = words

    def markup(self, *, standalone: bool = False) -> str:
        """Return the element, for a page; or all of a file, with its style sheet."""
        if standalone:
            self._root.set("xmlns", "http://www.w3.org/2000/svg")
            self._root.set("width", _text(self.width))
            style = ET.Element("style")
            style.text = style_sheet()
            self._root.insert(2, style)
        ET.indent(self._root, " ")
        return ET.tostring(self._root, encoding="unicode") + ("\n" if standalone else "")

    def _add(self, tag: str, kind: str, *, says: str = "", **attributes: str) -> ET.Element:
        element = ET.SubElement(self._root, tag, {"class": kind, **attributes})
        if says:
            ET.SubElement(element, "title").text = says
        return element


def _text(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
