"""Picking row by row is numpy's take_along_axis."""

from __future__ import annotations

import numpy as np

from moe_optimizer.placement.rows import pick


def test_picks_as_numpy_does():
    rng = np.random.default_rng(0)
    values, columns = rng.random((3, 7)), rng.integers(0, 7, (3, 11))
    assert (pick(values, columns) == np.take_along_axis(values, columns, axis=1)).all()
    assert (pick(values[:, ::2], columns % 4) == np.take_along_axis(values[:, ::2], columns % 4, axis=1)).all()
