"""Widths of experts' slices."""

from __future__ import annotations

import pytest

from moe_optimizer.specs.expert_formats import INT4, MXFP4, sliced_width


@pytest.mark.parametrize(
    ("width", "slices", "weight_format", "columns"),
    [(2880, 1, MXFP4, 2880), (2880, 2, MXFP4, 1440), (2880, 4, MXFP4, 736), (2880, 8, MXFP4, 384), (768, 8, MXFP4, 96),
     (2880, 4, "dtype", 720), (2880, 4, INT4, 720)],
)  # fmt: skip
def test_a_slice_of_mxfp4_is_whole_groups_of_32(width: int, slices: int, weight_format: str, columns: int) -> None:
    assert sliced_width(width, slices, weight_format) == columns
