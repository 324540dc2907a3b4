"""Names and sizes of the formats in which experts are held, for planning, which imports no torch."""

from __future__ import annotations

MXFP4 = "mxfp4"
MXFP4_BITS = 4 + 8 / 32
"""Bits of a weight: its code, and its share of the byte that 32 have in common."""
MXFP4_GROUP = 32
"""Columns that share a scale."""

INT4 = "int4"
INT4_GROUPS = (32, 64, 128)
"""Columns that may share a scale of 16 bits."""


def int4_weights(group: int, *, zero_points: bool) -> str:
    """Return how tables of kernel speeds call INT4 weights: "int4_g128", with zero points "int4_g128z"."""
    return f"{INT4}_g{group}{'z' if zero_points else ''}"


def four_bits(weight_format: str, group: int) -> float:
    """Return the bits of a weight in a format of four bits, with its share of a scale of `group` columns."""
    return 4 + (16 if weight_format == INT4 else 8) / group
