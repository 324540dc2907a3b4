"""Draws expert load as a picture: layers down, experts across. Needs Pillow, an optional dependency."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moe_optimizer.errors import InputError, printable
from moe_optimizer.files import write_atomically
from moe_optimizer.measure.report.heatmap import OCTAVES, UNUSED, colours, every, times_mean
from moe_optimizer.specs.expert_load import ExpertLoad

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

_BLACK, _GREY = (20, 20, 20), (110, 110, 110)
_DENSITY = 2
"""Pixels for each point: sharp on the screens and in the documents of today."""
_MARGIN = 16 * _DENSITY
_FONT_SIZE = 14 * _DENSITY
_LINE = 20 * _DENSITY
_LABELS = 64 * _DENSITY
"""Pixels left of the cells for layer numbers."""
_SCALE = 240 * _DENSITY
"""Pixels of the colour scale."""
_SWATCH = 11 * _DENSITY
_GAP = 4 * _DENSITY


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
    if not path.parent.is_dir():
        raise InputError(f"--png: {path}: its folder does not exist")
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
    image.paste(Image.fromarray(_cells(load, cell_width, cell_height)), (_MARGIN + _LABELS, top))
    _draw_axes(draw, load, (_MARGIN + _LABELS, top), (cell_width, cell_height))
    bottom = top + len(load.layers) * cell_height + 2 * _LINE
    scale = colours(2.0 ** np.linspace(-OCTAVES, OCTAVES, _SCALE))
    image.paste(Image.fromarray(np.tile(scale, (_SWATCH, 1, 1))), (_MARGIN + _LABELS, bottom))
    _label_scale(draw, _MARGIN + _LABELS, bottom)
    written = io.BytesIO()
    image.save(written, format="PNG", dpi=(72 * _DENSITY, 72 * _DENSITY))
    try:
        write_atomically(path, written.getvalue())
    except OSError as error:
        raise InputError(f"--png: {path}: {error.strerror or error}") from None


def _cell_size(load: ExpertLoad) -> tuple[int, int]:
    """Return width and height of a cell in pixels: large for small models, and a readable picture for large ones."""
    width, height = min(24, max(4, 1200 // load.num_experts)), min(24, max(8, 800 // len(load.layers)))
    return width * _DENSITY, height * _DENSITY


def _title(load: ExpertLoad) -> str:
    return printable(f"{load.model}: tokens of each expert, as a multiple of its layer's mean").replace("\n", " ")


def _cells(load: ExpertLoad, width: int, height: int) -> np.ndarray:
    """Return the pixels of all cells, with a white line between cells that are large enough for one."""
    pixels = colours(times_mean(load)).repeat(height, axis=0).repeat(width, axis=1)
    if min(width, height) >= 8 * _DENSITY:
        for offset in range(1, _DENSITY + 1):
            pixels[height - offset :: height] = 255
            pixels[:, width - offset :: width] = 255
    return pixels


def _draw_axes(draw: ImageDraw, load: ExpertLoad, origin: tuple[int, int], cell: tuple[int, int]) -> None:
    x, y = origin
    bottom = y + len(load.layers) * cell[1]
    for row in range(0, len(load.layers), every(len(load.layers), cell[1], _LINE)):
        middle = y + row * cell[1] + cell[1] // 2
        draw.text((x - 2 * _GAP, middle), str(load.layers[row].index), fill=_BLACK, anchor="rm")
    draw.text((_MARGIN, y - _GAP), "layer", fill=_GREY, anchor="ls")
    for column in range(0, load.num_experts, every(load.num_experts, cell[0], 2 * _LINE)):
        draw.text((x + column * cell[0] + cell[0] // 2, bottom + _GAP), str(column), fill=_BLACK, anchor="mt")
    draw.text((x, y - _GAP), "expert", fill=_GREY, anchor="ls")


def _label_scale(draw: ImageDraw, x: int, y: int) -> None:
    for exponent in range(-OCTAVES, OCTAVES + 1):
        position = x + round((exponent + OCTAVES) / (2 * OCTAVES) * (_SCALE - 1))
        label = f"{2**exponent}" if exponent >= 0 else f"1/{2**-exponent}"
        draw.text((position, y + _SWATCH + _GAP // 2), label, fill=_BLACK, anchor="mt")
    left = x + _SCALE + 6 * _GAP
    draw.rectangle((left, y, left + _SWATCH - 1, y + _SWATCH - 1), fill=UNUSED)
    draw.text((left + _SWATCH + _GAP, y + _SWATCH // 2), "no token", fill=_BLACK, anchor="lm")
