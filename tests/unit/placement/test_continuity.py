"""Names and slots: whatever they are, the same units with the same experts, and as much as possible in place."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moe_optimizer.placement.continuity import align_slots, names_near, renamed


@st.composite
def two_tables(draw):
    """Rows of few experts, so that some are in a row twice and some in both tables."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 5)))
    elements = st.integers(0, draw(st.integers(0, 8)))
    return tuple(draw(arrays.arrays(np.int64, shape, elements=elements)) for _ in range(2))


@given(two_tables())
def test_aligned_rows_keep_their_experts_and_every_slot_they_share(tables):
    new, old = tables
    aligned = align_slots(new, old)
    for before, after, wanted in zip(old.tolist(), aligned.tolist(), new.tolist(), strict=True):
        assert sorted(after) == sorted(wanted)
        shared = (Counter(before) & Counter(wanted)).total()
        assert sum(one == other for one, other in zip(before, after, strict=True)) == shared


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 3), st.data())
def test_every_unit_gets_one_name(rows, units, slots, data):
    items = st.integers(0, 11)
    new, old = (data.draw(arrays.arrays(np.int64, (rows, units, slots), elements=items)) for _ in range(2))
    names = names_near(new, old, 12)
    assert (np.sort(names, axis=1) == np.arange(units)).all()
    for row in range(rows):
        assert sorted(map(tuple, renamed(new, names)[row])) == sorted(map(tuple, new[row]))


@given(st.integers(1, 3), st.integers(1, 8), st.integers(1, 4), st.randoms(use_true_random=False))
def test_units_that_only_changed_places_get_their_names_back(rows, units, slots, random):
    old = np.arange(units * slots).reshape(1, units, slots).repeat(rows, axis=0)
    new = old.copy()
    for row in new:
        row[:] = row[random.sample(range(units), units)]
    assert (renamed(new, names_near(new, old, units * slots)) == old).all()


def test_of_two_units_that_want_one_name_the_one_with_more_in_common_gets_it():
    old = np.array([[[0, 1, 2], [3, 4, 5]]])
    new = np.array([[[0, 6, 7], [1, 2, 8]]])
    assert names_near(new, old, 9).tolist() == [[1, 0]]
