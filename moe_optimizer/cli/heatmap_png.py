"""Expert load as a picture: layers down, experts across. Needs Pillow, an optional dependency."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_optimizer.errors import InputError, printable
from moe_optimizer.specs.expert_load import ExpertLoad, LayerLoad

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

_OCTAVES = 3
"""The scale ends at 2**-3 and 2**3 times the mean: beyond, a colour would say no more than that it is far off."""
# Cold to hot: dark blue, white at the mean, dark red. Blue and red stay apart for every kind of colour blindness.
_STOPS = ((33, 80, 156), (124, 170, 220), (247, 247, 247), (239, 138, 98), (165, 15, 34))
_BLACK, _GREY, _UNUSED = (20, 20, 20), (110, 110, 110), (205, 205, 205)
_MARGIN = 16
_FONT_SIZE = 14
_LINE = 20
_LABELS = 64
"""Pixels left of the cells for layer numbers."""
_SCALE = 240
"""Pixels of the colour scale."""


def write_heatmap(load: ExpertLoad, path: Path) -> None:
    """Write the heatmap to `path`, PNG whatever its name ends in.

    Raises:
        InputError: Pillow is not installed, nothing was counted, or the file cannot be written.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise InputError(f"--png: needs Pillow ({error})", hint="run: pip install pillow") from None
    if not any(layer.total for layer in load.layers):
        raise InputError("--png: no token was counted yet")
    cell_width, cell_height = _cell_size(load)
    title, font = _title(load), ImageFont.load_default(_FONT_SIZE)
    widths = (_LABELS + load.num_experts * cell_width, _LABELS + 2 * _SCALE, math.ceil(font.getlength(title)))
    width = max(widths) + 2 * _MARGIN
    height = 2 * _MARGIN + 5 * _LINE + len(load.layers) * cell_height + 2 * _LINE
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    draw.font = font
    top = _MARGIN + 3 * _LINE
    draw.text((_MARGIN, _MARGIN), title, fill=_BLACK)
    draw.text((_MARGIN, _MARGIN + _LINE), f"{load.steps} steps since {load.since}", fill=_GREY)
    _draw_cells(draw, load, (_MARGIN + _LABELS, top), (cell_width, cell_height))
    _draw_axes(draw, load, (_MARGIN + _LABELS, top), (cell_width, cell_height))
    _draw_scale(draw, _MARGIN + _LABELS, top + len(load.layers) * cell_height + 2 * _LINE)
    _save(image, path)


def colour(value: float) -> tuple[int, int, int]:
    """Return the colour of a load that is `value` times the mean; grey for none."""
    if value <= 0:
        return _UNUSED
    position = (min(max(math.log2(value), -_OCTAVES), _OCTAVES) + _OCTAVES) / (2 * _OCTAVES) * (len(_STOPS) - 1)
    lower = min(int(position), len(_STOPS) - 2)
    share = position - lower
    low, high = _STOPS[lower], _STOPS[lower + 1]
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return red, green, blue


def _cell_size(load: ExpertLoad) -> tuple[int, int]:
    """Return width and height of a cell in pixels: large for small models, and a readable picture for large ones."""
    return min(24, max(4, 1200 // load.num_experts)), min(24, max(8, 800 // len(load.layers)))


def _title(load: ExpertLoad) -> str:
    return printable(f"{load.model}: tokens of each expert, as a multiple of its layer's mean").replace("\n", " ")


def _draw_cells(draw: ImageDraw, load: ExpertLoad, origin: tuple[int, int], cell: tuple[int, int]) -> None:
    gap = 1 if min(cell) >= 8 else 0
    for row, layer in enumerate(load.layers):
        y = origin[1] + row * cell[1]
        for column, value in enumerate(_times_mean(layer)):
            x = origin[0] + column * cell[0]
            draw.rectangle((x, y, x + cell[0] - 1 - gap, y + cell[1] - 1 - gap), fill=colour(value))


def _times_mean(layer: LayerLoad) -> list[float]:
    mean = layer.total / len(layer.tokens)
    return [tokens / mean if mean else 0.0 for tokens in layer.tokens]


def _draw_axes(draw: ImageDraw, load: ExpertLoad, origin: tuple[int, int], cell: tuple[int, int]) -> None:
    x, y = origin
    bottom = y + len(load.layers) * cell[1]
    every = _step(len(load.layers), cell[1], _LINE)
    for row in range(0, len(load.layers), every):
        middle = y + row * cell[1] + cell[1] // 2
        draw.text((x - 8, middle), str(load.layers[row].index), fill=_BLACK, anchor="rm")
    draw.text((_MARGIN, y - 4), "layer", fill=_GREY, anchor="ls")
    every = _step(load.num_experts, cell[0], 2 * _LINE)
    for column in range(0, load.num_experts, every):
        draw.text((x + column * cell[0] + cell[0] // 2, bottom + 4), str(column), fill=_BLACK, anchor="mt")
    draw.text((x, y - 4), "expert", fill=_GREY, anchor="ls")


def _step(count: int, pixels: int, room: int) -> int:
    """Return every how many rows or columns a number fits: 1, 2, 4, 8 ..."""
    step = 1
    while step * pixels < room and step < count:
        step *= 2
    return step


def _draw_scale(draw: ImageDraw, x: int, y: int) -> None:
    for offset in range(_SCALE):
        exponent = (offset / (_SCALE - 1) * 2 - 1) * _OCTAVES
        draw.line((x + offset, y, x + offset, y + 10), fill=colour(2.0**exponent))
    for exponent in range(-_OCTAVES, _OCTAVES + 1):
        position = x + round((exponent + _OCTAVES) / (2 * _OCTAVES) * (_SCALE - 1))
        label = f"{2**exponent}" if exponent >= 0 else f"1/{2**-exponent}"
        draw.text((position, y + 14), label, fill=_BLACK, anchor="mt")
    draw.rectangle((x + _SCALE + 24, y, x + _SCALE + 34, y + 10), fill=_UNUSED)
    draw.text((x + _SCALE + 40, y + 5), "no token", fill=_BLACK, anchor="lm")


def _save(image: Any, path: Path) -> None:
    """Write through a temporary file, so that a reader never sees half a picture."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                image.save(stream, format="PNG")
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"--png: {path}: {error.strerror or error}") from None
