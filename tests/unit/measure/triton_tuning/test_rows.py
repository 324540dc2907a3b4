from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.inspection.tuned_configs import nearest
from moe_optimizer.inspection.tuning_state import Verdict
from moe_optimizer.measure.triton_tuning.rows import file_rows, reach

LARGEST = 300


def row(number: int) -> dict[str, int]:
    return {"BLOCK_SIZE_M": number}


def win(tokens: int, won: dict[str, int], low: int, high: int) -> Verdict:
    """A row that is used for [low, high]; its times are not looked at."""
    return Verdict(tokens=tokens, stock={}, row=won, stock_us=2.0, row_us=1.0, ratio=2.0, low=low, high=high)


def stepped(edges: set[int]):
    """A stock that changes its row after each of some sizes, as vLLM's default does."""
    return lambda tokens: row(sum(tokens > edge for edge in edges))


SIZES = st.sets(st.integers(1, LARGEST), min_size=1, max_size=8)


@given(edges=st.sets(st.integers(1, LARGEST), max_size=6), sizes=SIZES, won=st.sets(st.integers(1, LARGEST)))
def test_every_size_outside_a_win_has_what_vllm_takes_without_the_file(edges, sizes, won):
    stock, reaches = stepped(edges), reach(sorted(sizes))
    wins = [win(tokens, row(1000 + tokens), *reaches[tokens]) for tokens in sizes & (won | {max(sizes)})]
    rows = file_rows(stock, wins, largest=LARGEST)
    for tokens in range(1, LARGEST + 1):
        winner = next((each.row for each in wins if each.low <= tokens <= each.high), None)
        assert nearest(rows, tokens) == (winner or stock(tokens)), tokens


@given(sizes=SIZES)
def test_each_size_is_within_its_reach_and_no_two_reaches_meet(sizes):
    reaches = reach(sorted(sizes))
    covered = [tokens for low, high in reaches.values() for tokens in range(low, high + 1)]
    assert covered == list(range(1, max(sizes) + 1))
    assert all(low <= tokens <= high for tokens, (low, high) in reaches.items())


def test_a_win_at_one_size_alone_is_used_there_alone():
    rows = file_rows(lambda _: row(0), [win(64, row(1), 64, 64)], largest=LARGEST)
    assert rows == {1: row(0), 63: row(0), 64: row(1), 65: row(0), LARGEST: row(0)}


def test_without_a_win_the_file_is_stock():
    assert file_rows(lambda _: row(0), [], largest=LARGEST) == {1: row(0), LARGEST: row(0)}
