from __future__ import annotations

import json

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.tuned_configs import nearest, read_rows, state_path
from moe_optimizer.inspection.tuning_state import load_state, read_tuning
from moe_optimizer.measure.triton_tuning.search import key_of
from moe_optimizer.measure.triton_tuning.tune import MARGIN, TuneRequest, tune
from moe_optimizer.specs.triton_shape import TritonShape

STOCK = {
    "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "SPLIT_K": 1, "num_warps": 4,
    "num_stages": 3,
}  # fmt: skip
BETTER = {**STOCK, "num_stages": 4}
DEADLY = key_of({**BETTER, "num_warps": 8})
NAME = "E=8,N=256,device_name=NVIDIA_H200.json"


class FakeBench:
    """A GPU on which four stages are as many times faster as `gain` says for a size; a call costs a second."""

    vllm_version = "0.26.0"
    triton_version = "3.6.0"

    def __init__(self, gain: dict[int, float], ends_at: str = "", how: type[BaseException] = KeyboardInterrupt) -> None:
        self.gain = gain
        self.ends_at = ends_at
        self.how = how
        self.clock = 0.0
        self.measured: list[str] = []

    def stock_row(self, tokens):
        return {**STOCK, "BLOCK_SIZE_M": 16 if tokens <= 96 else 64}

    def quick_us(self, row, tokens):
        self.clock += 1
        self.measured.append(key_of(row))
        if key_of(row) == self.ends_at:
            raise self.how
        return self._us(row, tokens)

    def interleaved_us(self, rows, tokens):
        self.clock += 1
        return [[self._us(row, tokens)] * 3 for row in rows]

    def forget(self, tokens):
        pass

    def _us(self, row, tokens):
        faster = {**self.stock_row(tokens), "num_stages": 4}
        size = min(self.gain, key=lambda each: abs(each - tokens))
        return 10.0 / self.gain[size] if row == faster else 10.0 if row == self.stock_row(tokens) else 20.0


def request(folder, tokens=(8, 64, 512), budget_s=1000.0):
    shape = TritonShape(num_experts=8, width=256, device_name="NVIDIA H200", dtype="", block=None)
    return TuneRequest(
        shape=shape, num_experts=8, top_k=2, hidden_size=64, dtype="bfloat16", tokens=tokens, budget_s=budget_s,
        folder=str(folder), shipped_folder=str(folder / "shipped"),
    )  # fmt: skip


VERDICT = {"tokens": 8, "stock": {}, "row": {}, "stock_us": 2.0, "row_us": 1.0, "ratio": 2.0, "low": 1, "high": 8}


def run(bench, folder, **changes):
    return tune(request(folder, **changes), bench, lambda *_: None, now=lambda: bench.clock)


def test_rows_that_win_are_written_and_every_other_size_is_as_in_vllm(tmp_path):
    bench = FakeBench({8: 1.2, 64: 1.01, 512: 1.0})
    run(bench, tmp_path)
    rows = read_rows(tmp_path / NAME)
    for tokens in range(1, 2000):
        assert nearest(rows, tokens) == (BETTER if tokens <= 36 else bench.stock_row(tokens)), tokens
    assert json.loads((tmp_path / NAME).read_text())["triton_version"] == "3.6.0"


def test_a_row_below_the_margin_replaces_nothing(tmp_path):
    state = run(FakeBench({8: MARGIN - 0.01}), tmp_path, tokens=(8,))
    assert not (tmp_path / NAME).exists()
    assert state.verdicts["8"].ratio == pytest.approx(MARGIN - 0.01)
    assert not state.verdicts["8"].won


def test_a_row_that_is_slower_at_the_end_of_its_reach_stays_at_its_size(tmp_path):
    bench = FakeBench({1: 0.9, 8: 1.2, 36: 0.9, 64: 1.0})
    verdict = run(bench, tmp_path, tokens=(8, 64)).verdicts["8"]
    assert (verdict.low, verdict.high) == (8, 8)
    assert nearest(read_rows(tmp_path / NAME), 9) == STOCK


def test_a_tuning_that_was_stopped_goes_on_where_it_was(tmp_path):
    stopped = FakeBench({8: 1.2}, ends_at=DEADLY, how=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, tmp_path, tokens=(8,))
    going_on = FakeBench({8: 1.2})
    state = run(going_on, tmp_path, tokens=(8,))
    assert set(stopped.measured) & set(going_on.measured) == {DEADLY}
    assert state.measured["8"][DEADLY] is not None
    assert state.verdicts["8"].won


def test_a_row_that_ended_the_process_is_not_tried_again(tmp_path):
    dying = FakeBench({8: 1.2}, ends_at=DEADLY, how=RuntimeError)
    with pytest.raises(RuntimeError):
        run(dying, tmp_path, tokens=(8,))
    going_on = FakeBench({8: 1.2}, ends_at=DEADLY, how=RuntimeError)
    state = run(going_on, tmp_path, tokens=(8,))
    assert DEADLY not in going_on.measured
    assert state.measured["8"][DEADLY] is None


def test_another_vllm_starts_anew(tmp_path):
    run(FakeBench({8: 1.2}), tmp_path, tokens=(8,))
    later = FakeBench({8: 1.2})
    later.vllm_version = "0.27.0"
    run(later, tmp_path, tokens=(8,))
    assert key_of(STOCK) in later.measured


def test_the_budget_bounds_the_search_and_every_size_has_its_share(tmp_path):
    bench = FakeBench({8: 1.2})
    state = run(bench, tmp_path, budget_s=30.0)
    assert bench.clock <= 30 + 9  # at most one comparison of a size, with both ends, runs over
    counts = [len(state.measured[tokens]) for tokens in ("8", "64", "512")]
    assert min(counts) >= 4


def test_what_the_budget_does_not_reach_is_not_compared_and_not_written(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(FakeBench({8: 1.2}, ends_at=DEADLY), tmp_path, tokens=(8,))
    bench = FakeBench({8: 1.2})
    state = run(bench, tmp_path, tokens=(8,), budget_s=0.0)
    assert state.measured["8"][key_of(BETTER)] is not None
    assert (bench.clock, state.verdicts) == (0.0, {})
    assert not (tmp_path / NAME).exists()


def test_a_size_that_a_later_run_compared_is_not_reached_over(tmp_path):
    run(FakeBench({64: 1.2}), tmp_path, tokens=(64,))
    assert nearest(read_rows(tmp_path / NAME), 8) == BETTER  # alone, 64 reaches down to 1
    run(FakeBench({8: 1.0}), tmp_path, tokens=(8,))
    rows = read_rows(tmp_path / NAME)
    assert [nearest(rows, tokens) == BETTER for tokens in (8, 36, 37, 64)] == [False, False, True, True]


def test_a_result_that_does_not_win_any_more_is_taken_back(tmp_path):
    run(FakeBench({8: 1.2}), tmp_path, tokens=(8,))
    assert (tmp_path / NAME).exists()
    run(FakeBench({8: 1.0}), tmp_path, tokens=(8,))
    assert not (tmp_path / NAME).exists()


def test_a_configuration_of_the_users_own_is_not_replaced(tmp_path):
    (tmp_path / NAME).write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="by a tuning"):
        run(FakeBench({8: 1.2}), tmp_path)


def test_what_it_measured_for_the_sizes_that_won_is_read_back(tmp_path):
    run(FakeBench({8: 1.2, 64: 1.01, 512: 1.1}), tmp_path)
    state = read_tuning(tmp_path / NAME)
    assert state is not None
    assert state.identity["vllm"] == "0.26.0"
    assert {each.tokens: each.ratio for each in state.verdicts.values() if each.won} == {
        8: 10 / (10 / 1.2),
        512: 10 / (10 / 1.1),
    }


def test_a_configuration_that_no_tuning_made_has_nothing_measured(tmp_path):
    assert read_tuning(tmp_path / NAME) is None


@pytest.mark.parametrize(
    "state",
    [
        {"verdicts": {}},
        {"identity": {"vllm": "0.26.0"}, "verdicts": {"8": {"tokens": 8}}},
        {"identity": {"vllm": "0.26.0"}, "verdicts": {"8": VERDICT | {"ratio": float("nan")}}},
        {"identity": {"vllm": "0.26.0"}, "verdicts": {"8": VERDICT | {"tokens": 0}}},
        {"identity": {"vllm": "0.26.0"}, "verdicts": []},
    ],
)
def test_measurements_that_cannot_be_read_are_an_error(tmp_path, state):
    state_path(tmp_path / NAME).write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(InputError, match=r"H200\.tuning\.json: .*this version: "):
        read_tuning(tmp_path / NAME)


def test_a_broken_state_is_the_users_to_delete(tmp_path):
    path = state_path(tmp_path / NAME)
    path.write_text(json.dumps({"identity": {}, "measured": []}), encoding="utf-8")
    with pytest.raises(InputError, match="of this version"):
        load_state(path, {})
