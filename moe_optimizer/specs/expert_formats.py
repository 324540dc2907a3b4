"""Names and sizes of the formats in which experts are held, for planning, which imports no torch."""

from __future__ import annotations

import math

MXFP4 = "mxfp4"
MXFP4_BITS = 4 + 8 / 32
"""Bits of a weight: its code, and its share of the byte that 32 have in common."""
MXFP4_GROUP = 32
"""Columns that share a scale."""
_LINE_BYTES, _BURST_BYTES = 128, 64
"""Of a GPU: a line of its L2 cache, and what its memory reads at once."""

INT4 = "int4"
INT4_GROUPS = (32, 64, 128)
"""Columns that may share a scale of 16 bits."""


def int4_weights(group: int, *, zero_points: bool) -> str:
    """Return how tables of kernel speeds call INT4 weights: "int4_g128", with zero points "int4_g128z"."""
    return f"{INT4}_g{group}{'z' if zero_points else ''}"


def four_bits(weight_format: str, group: int) -> float:
    """Return the bits of a weight in a format of four bits, with its share of a scale of `group` columns."""
    return 4 + (16 if weight_format == INT4 else 8) / group


def sliced_width(width: int, slices: int, weight_format: str) -> int:
    """Return the columns of each slice of an expert.

    Of a checkpoint in MXFP4 a slice is whole groups, up to which vLLM fills it up: each of four slices of gpt-oss has
    736 columns.
    """
    group = MXFP4_GROUP if weight_format == MXFP4 else 1
    return math.ceil(width / slices / group) * group if group > 1 else width // slices


def row_pitch(row_bytes: int) -> int:
    """Return how many bytes a row of codes and what fills it up take on a GPU.

    Rows that are whole multiples of 64 bytes, by which memory is read, lie together. Others begin on a line of their
    own, of 128 bytes, where that takes at most an eighth more memory: with gpt-oss's rows of 1440 bytes a layer took
    0.93 to 0.94 of the time from 16 to 256 tokens, while of 704 and 192 bytes nothing was gained
    (benchmarks/records/2026-11-28_h100_weight_fetch_trials.json).
    """
    pitch = math.ceil(row_bytes / _LINE_BYTES) * _LINE_BYTES
    return row_bytes if row_bytes % _BURST_BYTES == 0 or 8 * (pitch - row_bytes) > row_bytes else pitch
