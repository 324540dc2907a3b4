"""The figures that placements are judged by."""

from __future__ import annotations

import numpy as np
import pytest

from moe_optimizer.placement import imbalance, moves, node_traffic, rank_loads

LOAD = np.array([[6.0, 2.0, 1.0, 1.0], [0.0, 4.0, 0.0, 0.0]])


def test_replicas_share_the_load_of_their_expert():
    placement = np.array([[0, 1, 0, 2, 3, 2]] * 2)
    assert rank_loads(LOAD, placement, 3).tolist() == [[5.0, 3.5, 1.5], [4.0, 0.0, 0.0]]


def test_imbalance_adds_the_layers_up_before_it_divides():
    # Fullest 8 and 4, average 5 and 2: a quiet layer counts by its tokens, not as much as a busy one.
    assert imbalance(LOAD, np.array([[0, 1, 2, 3]] * 2), 2) == pytest.approx((8 + 4) / (5 + 2))


def test_no_load_is_even():
    assert imbalance(np.zeros((1, 4)), np.array([[0, 1, 2, 3]]), 2) == 1.0


def test_moves_count_what_a_rank_did_not_have():
    old, new = np.array([[0, 1, 2, 3]]), np.array([[1, 0, 2, 2]])
    assert moves(old, new, 2) == 1
    assert moves(old, np.array([[2, 3, 0, 1]]), 2) == 4


def test_a_second_copy_on_a_rank_is_a_move():
    assert moves(np.array([[0, 1, 2, 3]]), np.array([[0, 0, 2, 3]]), 2) == 1


def test_a_group_on_two_nodes_counts_twice():
    whole, split = np.array([[0, 1, 2, 3]]), np.array([[0, 2, 1, 3]])
    assert node_traffic(LOAD[:1], whole, 2, 2).tolist() == [10.0]
    assert node_traffic(LOAD[:1], split, 2, 2).tolist() == [20.0]
