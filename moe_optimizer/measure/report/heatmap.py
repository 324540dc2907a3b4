"""Draws expert load: layers down, experts across, colour for a multiple of the layer's mean."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from moe_optimizer.costs.expert_imbalance import LoadReport
from moe_optimizer.measure.report.svg import Picture
from moe_optimizer.specs.expert_load import ExpertLoad

OCTAVES = 3
"""The scale ends at 2**-3 and 2**3 times the mean: beyond, a colour would say no more than that it is far off."""
# Cold to hot: dark blue, white at the mean, dark red. Blue and red stay apart for every kind of colour blindness.
_STOPS = ((33, 80, 156), (124, 170, 220), (247, 247, 247), (239, 138, 98), (165, 15, 34))
UNUSED = (205, 205, 205)
_STEPS = 4
"""Colours of an octave in a page: one path each, so that 48 layers of 128 experts stay small."""
_WIDTH, _LEFT, _TOP, _BELOW = 900.0, 44.0, 46.0, 74.0


def colours(times_mean: np.ndarray) -> np.ndarray:
    """Return the colour of each load, given as a multiple of the mean: uint8 RGB as last dimension, grey for none."""
    exponents = np.log2(np.clip(times_mean, 2.0**-OCTAVES, 2.0**OCTAVES))
    positions = np.linspace(-OCTAVES, OCTAVES, len(_STOPS))
    channels = [np.interp(exponents, positions, channel) for channel in zip(*_STOPS, strict=True)]
    used = times_mean[..., np.newaxis] > 0
    return np.where(used, np.stack(channels, axis=-1).round(), UNUSED).astype(np.uint8)


def times_mean(load: ExpertLoad) -> np.ndarray:
    """Return each expert's tokens as a multiple of its layer's mean: float [layers, experts]."""
    tokens = np.array([layer.tokens for layer in load.layers], dtype=float)
    return tokens / np.maximum(tokens.mean(axis=1, keepdims=True), 1e-9)


def heatmap(load: ExpertLoad, report: LoadReport) -> Picture:
    """Return the heatmap of a load in which something was counted."""
    assert report.mean is not None, "nothing was counted"
    cell_width = (_WIDTH - _LEFT) / load.num_experts
    cell_height = min(22.0, max(7.0, 460.0 / len(load.layers)))
    bottom = _TOP + cell_height * len(load.layers)
    picture = Picture(
        _WIDTH,
        bottom + _BELOW,
        title="Tokens of each expert, as a multiple of its layer's mean",
        description=f"{len(load.layers)} layers of {load.num_experts} experts over {load.steps} steps: the busiest "
        f"expert of a layer gets {report.mean.max_over_mean:.2f} times the mean, {report.mean.unused} get none.",
    )
    shapes: dict[str, list[str]] = defaultdict(list)
    gap = 1.0 if cell_width > 6 else 0.0
    for row, values in enumerate(_rounded(times_mean(load))):
        for column, colour in enumerate(_names(values)):
            shapes[colour].append(
                f"M{_LEFT + column * cell_width:.1f},{_TOP + row * cell_height:.1f}"
                f"h{cell_width - gap:.1f}v{cell_height - gap:.1f}h{gap - cell_width:.1f}z"
            )
    for colour, parts in shapes.items():
        picture.path("".join(parts), kind="cell", fill=colour)
    for row in range(0, len(load.layers), every(len(load.layers), cell_height, 16)):
        middle = _TOP + (row + 0.5) * cell_height + 4
        picture.text(_LEFT - 8, middle, str(load.layers[row].index), anchor="end")
    for column in range(0, load.num_experts, every(load.num_experts, cell_width, 32)):
        picture.text(_LEFT + (column + 0.5) * cell_width, bottom + 16, str(column), anchor="middle")
    picture.text(_LEFT, _TOP - 8, "expert, from left to right; layer, from top to bottom")
    _draw_scale(picture, bottom + 34)
    return picture


def _rounded(values: np.ndarray) -> np.ndarray:
    """Bring values to a few steps of an octave; 0 stays 0."""
    exponents = np.round(np.log2(np.clip(values, 2.0**-OCTAVES, 2.0**OCTAVES)) * _STEPS) / _STEPS
    return np.where(values > 0, 2.0**exponents, 0.0)


def _names(values: np.ndarray) -> list[str]:
    return [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in colours(values).tolist()]


def _draw_scale(picture: Picture, top: float) -> None:
    steps = 2.0 ** np.linspace(-OCTAVES, OCTAVES, 2 * OCTAVES * _STEPS + 1)
    size = 10.0
    for number, colour in enumerate(_names(steps)):
        picture.path(f"M{_LEFT + number * size},{top}h{size}v10h-{size}z", kind="cell", fill=colour)
    for exponent in range(-OCTAVES, OCTAVES + 1):
        name = f"{2**exponent}x" if exponent >= 0 else f"1/{2**-exponent}"
        picture.text(_LEFT + ((exponent + OCTAVES) * _STEPS + 0.5) * size, top + 25, name, anchor="middle")
    end = _LEFT + len(steps) * size + 24
    picture.path(f"M{end},{top}h10v10h-10z", kind="cell", fill=_names(np.zeros(1))[0])
    picture.text(end + 16, top + 9, "no token")


def every(count: int, size: float, room: float) -> int:
    """Return every how many rows or columns a number fits: 1, 2, 4, 8 ..."""
    step = 1
    while step * size < room and step < count:
        step *= 2
    return step
