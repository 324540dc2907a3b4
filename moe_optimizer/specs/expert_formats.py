"""Names and sizes of the formats that experts are converted to, for planning, which imports no torch."""

from __future__ import annotations

MXFP4 = "mxfp4"
MXFP4_BITS = 4 + 8 / 32
"""Bits of a weight: its code, and its share of the byte that 32 have in common."""
MXFP4_GROUP = 32
"""Columns that share a scale."""
