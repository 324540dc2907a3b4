"""Picking row by row is numpy's take_along_axis, sorting is its stable argsort."""

from __future__ import annotations

import numpy as np

from moe_optimizer.placement.rows import ascending, pick


def test_picks_as_numpy_does():
    rng = np.random.default_rng(0)
    values, columns = rng.random((3, 7)), rng.integers(0, 7, (3, 11))
    assert (pick(values, columns) == np.take_along_axis(values, columns, axis=1)).all()
    assert (pick(values[:, ::2], columns % 4) == np.take_along_axis(values[:, ::2], columns % 4, axis=1)).all()


def test_of_equals_the_first_comes_first_on_every_cpu():
    rng = np.random.default_rng(1)
    for columns in (1, 8, 40, 300):
        tied, different = rng.integers(0, 9, (20, columns)).astype(float), rng.random((20, columns))
        full = np.where(tied > 4, np.inf, tied)
        for values in (tied, different, full, tied.astype(np.float32)):
            assert (ascending(values) == np.argsort(values, axis=1, kind="stable")).all()
