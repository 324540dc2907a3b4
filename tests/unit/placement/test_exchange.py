"""Exchanges only ever make the fullest rank lighter, and lose no replica."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moe_optimizer.placement.exchange import exchange


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 15), st.data())
def test_no_row_gets_fuller_and_every_replica_is_still_there(rows, ranks, places, data):
    shape = (rows, ranks * places)
    share = data.draw(arrays.arrays(np.float64, shape, elements=st.sampled_from([0.0, 1.0, 2.5, 1e9, 1e30])))
    placement = np.arange(shape[1])[None].repeat(rows, axis=0)
    done = exchange(placement, share, ranks, np.zeros(rows))
    assert (np.sort(done.placement, axis=1) == placement).all()
    loads = np.take_along_axis(share, done.placement, axis=1).reshape(rows, ranks, places).sum(axis=-1)
    np.testing.assert_allclose(done.largest, loads.max(axis=1), rtol=1e-9)
    assert (done.largest <= done.largest_before * (1 + 1e-12)).all()


def test_a_row_that_is_light_enough_is_left_alone():
    share = np.array([[3.0, 2.0, 1.0, 0.0]] * 2)
    placement = np.arange(4)[None].repeat(2, axis=0)
    done = exchange(placement, share, 2, np.array([3.0, 5.0]))
    assert (done.placement[1] == placement[1]).all()
    assert done.largest.tolist() == [3.0, 5.0]
