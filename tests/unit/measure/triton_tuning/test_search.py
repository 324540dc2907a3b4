from __future__ import annotations

import json

import pytest

from moe_optimizer.measure.triton_tuning.search import VALUES, fits, key_of, neighbours, row_of, search, seeds
from moe_optimizer.specs.triton_shape import TritonShape

START = {
    "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "SPLIT_K": 1, "num_warps": 4,
    "num_stages": 3,
}  # fmt: skip
SHAPE = TritonShape(num_experts=8, width=256, device_name="NVIDIA H200", dtype="", block=None)


def distance(row: dict[str, int], target: dict[str, int]) -> float:
    """Microseconds of a smooth hill whose foot is `target`."""
    return 10.0 + sum(abs(values.index(row[name]) - values.index(target[name])) for name, values in VALUES.items())


def test_the_search_reaches_the_best_row_of_a_smooth_hill():
    target = {**START, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 256, "num_warps": 8, "num_stages": 4, "GROUP_SIZE_M": 16}
    tried = search(START, [], lambda row: distance(row, target), time_left=lambda: True, seed=1)
    assert min(tried, key=lambda key: tried[key] or 99) == key_of(target)
    assert len(tried) < 100


def test_rows_that_do_not_work_are_not_built_upon():
    def measure(row):
        return None if row["num_warps"] == 8 else distance(row, {**START, "num_warps": 2})

    tried = search(START, [{**START, "num_warps": 8}], measure, time_left=lambda: True, seed=1)
    assert tried[key_of({**START, "num_warps": 8})] is None
    assert not any("num_warps=8" in key and "num_stages=4" in key for key in tried)


def test_without_time_only_the_start_is_measured():
    tried = search(START, [{**START, "num_warps": 8}], lambda _: 10.0, time_left=lambda: False, seed=1)
    assert tried == {key_of(START): 10.0}


def test_a_start_that_does_not_work_leaves_the_seeds():
    seed = {**START, "num_warps": 8}
    tried = search(START, [seed], lambda row: 5.0 if row == seed else None, time_left=lambda: True, seed=1)
    assert tried[key_of(seed)] == 5.0


def test_a_step_changes_one_parameter_to_the_next_value():
    steps = list(neighbours(START))
    assert all(sum(step[name] != START[name] for name in START) == 1 for step in steps)
    assert {step["BLOCK_SIZE_N"] for step in steps} == {32, 64, 128}
    assert {step["BLOCK_SIZE_M"] for step in steps} == {16, 32}


def test_a_key_is_its_row():
    assert row_of(key_of(START)) == START


@pytest.mark.parametrize(("stages", "fitting"), [(4, True), (5, False)])
def test_tiles_beyond_shared_memory_are_not_tried(stages, fitting):
    row = {**START, "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 64, "num_stages": stages}
    assert fits(row, weight_bytes=2) is fitting


def test_seeds_are_the_rows_of_the_same_gpu_and_dtype_near_the_size(tmp_path):
    common, rare = {**START, "BLOCK_SIZE_N": 128}, {**START, "BLOCK_SIZE_N": 256}
    older = {name: value for name, value in common.items() if name not in ("SPLIT_K", "num_warps", "num_stages")}
    files = {
        "E=8,N=1024,device_name=NVIDIA_H200.json": {"1": START, "64": common},
        "E=16,N=1024,device_name=NVIDIA_H200.json": {"64": older},
        "E=64,N=1024,device_name=NVIDIA_H200.json": {"32": rare},
        "E=8,N=1024,device_name=NVIDIA_H200,dtype=fp8_w8a8.json": {"64": {**START, "num_warps": 8}},
        "E=8,N=1024,device_name=NVIDIA_B200.json": {"64": {**START, "num_warps": 2}},
        "E=9,N=1024,device_name=NVIDIA_H200.json": {"64": {"of another kernel": 1}},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    assert seeds(tmp_path, SHAPE, 60) == [common, rare]
