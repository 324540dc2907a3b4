"""The counters against a plain count of the same ids; compiled, stacked, with padding, with ids that are no expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from moe_optimizer.vllm_plugin.expert_load.counter import ExpertCounter, LayerwiseCounter, StepwiseCounter

LAYERS = (1, 2, 5)
EXPERTS = 6
MAKERS: dict[str, Callable[[], ExpertCounter]] = {
    "layerwise": lambda: LayerwiseCounter(LAYERS, EXPERTS, top_k=2, max_rows=9),
    "stepwise": lambda: StepwiseCounter(LAYERS, EXPERTS, torch.device("cpu"), max_rows=8),
}


def counted(ids: torch.Tensor, limit: int) -> list[int]:
    counts = [0] * EXPERTS
    for row in ids[:limit].tolist():
        for expert in row:
            if 0 <= expert < EXPERTS:
                counts[expert] += 1
    return counts


def forward(counter: ExpertCounter, ids: Sequence[torch.Tensor]) -> None:
    for layer_id, each in zip(LAYERS, ids, strict=True):
        counter.capture(layer_id, each)
    counter.step_ended()


def counts_of(counter: ExpertCounter) -> list[list[int]]:
    return counter.table()[:, 1:-1].tolist()


def some_ids(rows: int, *, seed: int, dtype: torch.dtype = torch.int32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, EXPERTS, (rows, 2), generator=generator, dtype=dtype) for _ in LAYERS]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@given(
    ids=st.lists(
        st.lists(st.tuples(*[st.integers(-3, EXPERTS + 2)] * 2), min_size=4, max_size=4), min_size=3, max_size=3
    ),
    limits=st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
def test_every_expert_of_every_counted_row_counts_once(make, ids, limits):
    counter, tensors = make(), [torch.tensor(each, dtype=torch.int64) for each in ids]
    for limit in limits:
        counter.count_rows(limit)
        forward(counter, tensors)
    expected = [[sum(c) for c in zip(*(counted(each, limit) for limit in limits), strict=True)] for each in tensors]
    assert counts_of(counter) == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_dtypes_of_ids_that_routers_use(make, dtype):
    counter, ids = make(), some_ids(7, seed=1, dtype=dtype)
    counter.count_rows(7)
    forward(counter, ids)
    assert counts_of(counter) == [counted(each, 7) for each in ids]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_forward_before_any_step_adds_nothing_but_is_seen(make):
    counter = make()
    assert not counter.table().any()
    forward(counter, some_ids(3, seed=2))
    assert not torch.tensor(counts_of(counter)).any()
    assert counter.table().any(dim=1).all()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_step_without_rows_counts_nothing(make):
    counter = make()
    counter.count_rows(4)
    forward(counter, some_ids(0, seed=3))
    assert not torch.tensor(counts_of(counter)).any()


@pytest.mark.thorough
def test_a_compiled_forward_counts_as_the_plain_one():
    # Two batch sizes, so that the graph has a dynamic one. Traced and made functional as for Inductor, which compiles
    # the counter for the servers of tests/vllm/test_serving_equals_stock.py.
    counter = LayerwiseCounter(LAYERS, EXPERTS, top_k=2, max_rows=9)

    def forward_all(*ids: torch.Tensor) -> None:
        for layer_id, each in zip(LAYERS, ids, strict=True):
            counter.capture(layer_id, each)

    compiled = torch.compile(forward_all, fullgraph=True, dynamic=True, backend="aot_eager")
    expected = torch.zeros(len(LAYERS), EXPERTS, dtype=torch.int64)
    for rows, limit in ((5, 0), (5, 3), (9, 9)):
        ids = some_ids(rows, seed=rows)
        counter.count_rows(limit)
        compiled(*ids)
        counter.step_ended()
        expected += torch.tensor([counted(each, limit) for each in ids])
    assert counts_of(counter) == expected.tolist()


def test_layerwise_counts_a_router_that_chooses_fewer_experts_than_others():
    counter, (first, second, third) = LayerwiseCounter(LAYERS, EXPERTS, top_k=2, max_rows=8), some_ids(4, seed=4)
    counter.count_rows(3)
    forward(counter, [first, second[:, :1], third])
    assert counts_of(counter) == [counted(first, 3), counted(second[:, :1], 3), counted(third, 3)]


def test_layerwise_counts_a_layer_that_a_step_lacks_no_second_time():
    counter, (first, second, third) = LayerwiseCounter(LAYERS, EXPERTS, top_k=2, max_rows=8), some_ids(4, seed=5)
    counter.count_rows(4)
    forward(counter, [first, second, third])
    counter.capture(LAYERS[0], first)
    counter.step_ended()
    twice = [2 * count for count in counted(first, 4)]
    assert counts_of(counter) == [twice, counted(second, 4), counted(third, 4)]


def test_stepwise_counts_layers_of_different_shapes_and_a_step_that_lacks_some():
    counter = StepwiseCounter(LAYERS, EXPERTS, torch.device("cpu"), max_rows=8)
    counter.count_rows(8)
    first, second, third = some_ids(4, seed=4)
    forward(counter, [first, second[:, :1], third])
    counter.capture(LAYERS[-1], third)
    assert counts_of(counter) == [
        counted(first, 8),
        counted(second[:, :1], 8),
        [2 * count for count in counted(third, 8)],
    ]


def test_stepwise_counts_more_rows_than_it_was_told_of():
    counter, ids = StepwiseCounter(LAYERS, EXPERTS, torch.device("cpu"), max_rows=2), some_ids(5, seed=6)
    counter.count_rows(4)
    forward(counter, ids)
    assert counts_of(counter) == [counted(each, 4) for each in ids]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_read_table_does_not_change_afterwards(make):
    counter = make()
    before = counter.table()
    counter.count_rows(5)
    forward(counter, some_ids(5, seed=5))
    assert not before.any()
