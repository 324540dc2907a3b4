"""place_experts: never less even than vLLM's default policy, always a valid placement, and near the one before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moe_optimizer.errors import InputError
from moe_optimizer.placement import imbalance, moves, node_traffic, place_experts, rank_loads
from moe_optimizer.placement.balance import groups_on_nodes, replica_counts
from tests.examples import examples
from tests.unit.placement.deepseek import default_placement


def zipf(rng: np.random.Generator, layers: int, experts: int, power: float = 1.0) -> np.ndarray:
    return np.stack([rng.permutation(1e6 / np.arange(1, experts + 1) ** power) for _ in range(layers)])


# The families in which greedy choices go wrong: ties, zeros, single heavy experts, numbers that float32 rounds.
FAMILIES = {
    "tied": lambda rng, shape: rng.integers(0, 4, shape),
    "equal": lambda rng, shape: np.full(shape, int(rng.integers(1, 10**6))),
    "near equal": lambda rng, shape: 10**8 + rng.integers(0, 3, shape),
    "huge": lambda rng, shape: rng.integers(0, 2**62, shape),
    "one hot": lambda rng, shape: np.eye(shape[1], dtype=np.int64)[rng.integers(0, shape[1], shape[0])] * 10**9,
    "few busy": lambda rng, shape: rng.choice([0, 1, 1000], shape),
    "uniform": lambda rng, shape: rng.integers(900, 1100, shape),
    "zipf": lambda rng, shape: zipf(rng, *shape, power=rng.uniform(0.3, 3)),
    "log-normal": lambda rng, shape: rng.lognormal(0, rng.uniform(0.1, 3), shape),
    "falling": lambda rng, shape: np.tile(np.arange(shape[1])[::-1], (shape[0], 1)),
}


@st.composite
def loads(draw, shape):
    """Layers of different families, some without any load."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    layers = [FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))](rng, (1, shape[1])) for _ in range(shape[0])]
    load = np.concatenate([layer.astype(np.float64) for layer in layers])
    return load * (rng.random((shape[0], 1)) > 0.1)


@st.composite
def problems(draw):
    """A load and the numbers of ranks, replicas, nodes and groups that go with it."""
    num_nodes = draw(st.sampled_from([1, 1, 2, 3]))
    num_ranks = num_nodes * draw(st.sampled_from([1, 2, 3, 4, 16, 20]))
    num_groups = draw(st.sampled_from([1, num_nodes, 2 * num_nodes, 4]))
    num_experts = num_groups * draw(st.integers(1, 24))
    slots = -(-num_experts // num_ranks) + draw(st.integers(0, 2))
    layers = draw(st.integers(1, 3))
    # Drawn value by value too: hypothesis can then shrink what fails.
    few = arrays.arrays(np.int64, (layers, num_experts), elements=st.sampled_from([0, 1, 2, 3, 1000, 10**9]))
    load = draw(st.one_of(few, loads((layers, num_experts))))
    return load, num_ranks, num_ranks * slots, num_nodes, num_groups


def assert_valid(placement, load, num_ranks, num_replicas, num_nodes, num_groups):
    num_experts = load.shape[1]
    assert placement.shape == (len(load), num_replicas)
    assert placement.dtype == np.int64
    assert placement.min() >= 0
    assert placement.max() < num_experts
    assert (replica_counts(placement, num_experts) >= 1).all(), "an expert is nowhere"
    if num_groups % num_nodes == 0:
        nodes_of_group = groups_on_nodes(placement, num_experts, num_nodes, num_groups).sum(axis=1)
        assert (nodes_of_group == 1).all(), "a group is on several nodes"


def assert_as_even_as_default(placement, load, num_ranks, num_replicas, num_nodes, num_groups):
    theirs = default_placement(load, num_ranks, num_replicas, num_nodes, num_groups)
    our_largest = rank_loads(load.astype(float), placement, num_ranks).max(axis=1)
    their_largest = rank_loads(load.astype(float), theirs, num_ranks).max(axis=1)
    # The sums are made in another order: equal up to the rounding of float64.
    assert (our_largest <= their_largest * (1 + 1e-12)).all(), f"{our_largest} against {their_largest}"


@settings(max_examples=examples(200), deadline=None)
@given(problems(), st.data())
def test_valid_and_as_even_as_default_on_every_load_with_a_previous_placement_and_without(problem, data):
    load, *numbers = problem
    num_ranks, num_replicas, num_nodes, num_groups = numbers
    # Of other traffic, or of nearly the same, with which a part of it can be kept.
    near = load * np.random.default_rng(0).lognormal(0, 0.02, load.shape)
    before = data.draw(st.one_of(loads(load.shape), st.just(near)))
    previous = place_experts(before, num_ranks, num_replicas, num_nodes, num_groups)
    placement = place_experts(load, num_ranks, num_replicas, num_nodes, num_groups, previous)
    anew = place_experts(load, num_ranks, num_replicas, num_nodes, num_groups)
    for each in (placement, anew):
        assert_valid(each, load, *numbers)
        assert_as_even_as_default(each, load, *numbers)
    if num_groups > 1 and num_groups % num_nodes:
        traffic = node_traffic(load.astype(float), placement, num_nodes, num_groups)
        assert (traffic <= node_traffic(load.astype(float), anew, num_nodes, num_groups)).all()


# Large enough that the exchanges, several slots per rank and nodes with groups all take part.
@pytest.mark.parametrize(
    ("experts", "ranks", "replicas", "nodes", "groups"),
    [(256, 64, 320, 1, 1), (256, 32, 288, 4, 8), (256, 64, 320, 8, 8), (128, 8, 128, 1, 1), (160, 16, 176, 2, 8)],
)
@pytest.mark.parametrize("family", [*FAMILIES, "zero"])
def test_as_even_as_default_at_the_sizes_of_real_models(experts, ranks, replicas, nodes, groups, family):
    rng = np.random.default_rng(0)
    shape = (8, experts)
    load = np.asarray(FAMILIES[family](rng, shape) if family in FAMILIES else np.zeros(shape), dtype=np.float64)
    numbers = (ranks, replicas, nodes, groups)
    placement = place_experts(load, *numbers)
    assert_valid(placement, load, *numbers)
    assert_as_even_as_default(placement, load, *numbers)
    for noise in (0.01, 0.3):
        changed = load * rng.lognormal(0, noise, shape)
        moved = place_experts(changed, *numbers, previous=placement)
        assert_valid(moved, changed, *numbers)
        assert_as_even_as_default(moved, changed, *numbers)


def test_groups_of_one_node_break_ties_as_default_does():
    # The default policy orders experts by the load of their group even where there is one node to put them on.
    load = np.array([[1.0, 2, 0, 2, 0, 1, 3, 2]])
    assert_as_even_as_default(place_experts(load, 20, 60, 1, 4), load, 20, 60, 1, 4)


def test_more_even_than_default_on_skewed_load():
    load = np.random.default_rng(1).lognormal(0, 1, (16, 256))
    theirs = default_placement(load, 32, 288)
    assert imbalance(load, place_experts(load, 32, 288), 32) - 1 < 0.8 * (imbalance(load, theirs, 32) - 1)


def test_same_arguments_give_the_same_placement():
    load = np.random.default_rng(2).integers(0, 5, (4, 64))
    assert (place_experts(load, 8, 72) == place_experts(load.copy(), 8, 72)).all()


def test_layers_do_not_depend_on_each_other(monkeypatch):
    rng = np.random.default_rng(7)
    load = rng.lognormal(0, 1, (7, 32))
    previous = place_experts(load * rng.lognormal(0, 0.1, load.shape), 4, 36)
    together = [place_experts(load, 4, 36, previous=each) for each in (None, previous)]
    monkeypatch.setattr("moe_optimizer.placement.solver.BLOCK_SLOTS", 72)
    monkeypatch.setattr("moe_optimizer.placement.solver.BLOCK_LAYERS", 1)
    in_blocks = [place_experts(load, 4, 36, previous=each) for each in (None, previous)]
    assert all((one == other).all() for one, other in zip(together, in_blocks, strict=True))


def test_the_order_of_magnitude_of_the_load_does_not_matter():
    load = np.random.default_rng(3).integers(0, 1000, (4, 64)).astype(float)
    assert (place_experts(load, 8, 72) == place_experts(load * 2.0**60, 8, 72)).all()


def test_a_layer_without_load_spreads_its_replicas():
    counts = replica_counts(place_experts(np.zeros((1, 8)), 4, 12), 8)
    assert counts.max() == 2


def test_nothing_moves_when_the_load_stays():
    load = zipf(np.random.default_rng(4), 8, 128)
    placement = place_experts(load, 16, 144, num_nodes=2, num_groups=8)
    again = place_experts(load, 16, 144, num_nodes=2, num_groups=8, previous=placement)
    assert (again == placement).all()


def test_a_small_change_of_load_moves_less_than_placing_anew():
    rng = np.random.default_rng(5)
    load = rng.lognormal(0, 1, (8, 128))
    previous = place_experts(load, 8, 136)
    changed = load * rng.lognormal(0, 0.1, load.shape)
    near, anew = place_experts(changed, 8, 136, previous=previous), place_experts(changed, 8, 136)
    assert moves(previous, near, 8) < moves(previous, anew, 8) / 2
    assert imbalance(changed, near, 8) < imbalance(changed, anew, 8) * 1.002


def test_swapped_ranks_and_slots_are_recognised():
    # The old one is far too uneven to be kept, so what is new is renamed: rank 1 for rank 0, and slots within them.
    previous = np.array([[2, 3, 0, 1]])
    load = np.array([[9.0, 1.0, 8.0, 2.0]])
    placement = place_experts(load, 2, 4, previous=previous)
    assert moves(previous, placement, 2) == 0
    assert (placement == previous).all()


def test_names_near_the_old_placement_never_cost_more_moves_than_the_names_that_were_there():
    # Busy experts have many replicas, so that an expert's old place is one of several.
    for seed in range(60):
        rng = np.random.default_rng(seed)
        load = zipf(rng, 1, 32)
        changed = load * rng.lognormal(0, 0.5, load.shape)
        previous, anew = place_experts(load, 16, 352), place_experts(changed, 16, 352)
        near = place_experts(changed, 16, 352, previous=previous)
        assert moves(previous, near, 16) <= moves(previous, anew, 16), seed


def test_a_previous_placement_that_misses_an_expert_is_not_kept():
    load = np.ones((2, 4))
    previous = np.array([[0, 0, 2, 3], [-1, 1, 2, 3]])
    placement = place_experts(load, 2, 4, previous=previous)
    assert (replica_counts(placement, 4) == 1).all()


def test_ranks_of_a_group_share_a_node_where_groups_do_not_divide():
    # Six groups on four nodes: the global placement scatters them, and gathering the ranks saves traffic.
    load = np.random.default_rng(6).lognormal(0, 1, (8, 48))
    ours, theirs = (
        node_traffic(load, place(load, 16, 48, num_nodes=4, num_groups=6), 4, 6).sum() / load.sum()
        for place in (place_experts, default_placement)
    )
    # Tokens of a group go to so many of the four nodes, on average.
    assert ours < 3.5 < theirs


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_ranks": 3, "num_replicas": 8}, "num_replicas: got 8, .*num_ranks 3"),
        ({"num_ranks": 4, "num_replicas": 4}, "num_replicas: got 4, .* 8 "),
        ({"num_ranks": 4, "num_replicas": 8, "num_nodes": 3}, "num_ranks: got 4, .*num_nodes 3"),
        ({"num_ranks": 4, "num_replicas": 8, "num_groups": 3}, "experts: got 8, .*num_groups 3"),
        ({"num_ranks": 0, "num_replicas": 8}, "num_ranks: got 0"),
        ({"num_ranks": 4, "num_replicas": 8, "previous": [[0, 1]]}, "previous: .*(1, 2), .*(1, 8)"),
    ],
)
def test_numbers_that_do_not_fit_are_named(arguments, named):
    with pytest.raises(InputError, match="^" + named.replace("(", r"\(").replace(")", r"\)")):
        place_experts(np.ones((1, 8)), **arguments)


@pytest.mark.parametrize(
    "bad", [[[1.0, -1.0]], [[1.0, np.nan]], [[1.0, np.inf]], [[1.0, 1e39]], [1.0, 2.0], np.ones((0, 4))]
)
def test_a_load_that_is_none_is_refused(bad):
    with pytest.raises(InputError, match=r"^load: "):
        place_experts(bad, 1, 2)
