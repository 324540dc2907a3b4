"""Two results side by side: only of equal conditions, unless told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.measure.bench.result import RESULT_FILE, BenchResult
from moe_optimizer.measure.report.comparison import compare_results, read_measured, render
from moe_optimizer.plan.json_codec import encode
from tests.builders.results import bench_result


def stored(result: BenchResult, path: Path) -> Path:
    path.write_text(json.dumps(encode(result)))
    return path


def with_environment(**changes: str) -> BenchResult:
    result = bench_result()
    return dataclasses.replace(result, environment={**result.environment, **changes})


def test_the_ratio_is_above_1_where_the_second_is_faster(tmp_path: Path):
    slow, fast = stored(bench_result(slower=2.0), tmp_path / "a"), stored(bench_result(slower=1.0), tmp_path / "b")
    found = compare_results(read_measured(slow), read_measured(fast))
    of_stock = {(row.load, row.metric): row for row in found.rows if row.side == "stock"}
    assert len(of_stock) == 6
    assert all(row.ratio == pytest.approx(2.0, rel=0.15) for row in of_stock.values())
    assert of_stock["16 clients", "tpot_ms"].apart


def test_a_result_compared_with_itself_does_not_differ(tmp_path: Path):
    same = read_measured(stored(bench_result(), tmp_path / "a"))
    found = compare_results(same, same)
    assert {row.ratio for row in found.rows} == {1.0}
    assert not any(row.apart for row in found.rows)


@pytest.mark.parametrize("key", ["device", "vllm", "torch", "driver", "model", "gpus"])
def test_other_conditions_are_refused_by_name_unless_told(key: str, tmp_path: Path):
    mine = read_measured(stored(bench_result(), tmp_path / "a"))
    other = read_measured(stored(with_environment(**{key: "another"}), tmp_path / "b"))
    with pytest.raises(InputError, match=f"{key}: .*another"):
        compare_results(mine, other)
    found = compare_results(mine, other, allow_different=True)
    assert list(found.different) == [key]
    assert f"differs: {key}" in render(found)


def test_a_condition_that_one_file_does_not_name_differs(tmp_path: Path):
    mine = read_measured(stored(bench_result(), tmp_path / "a"))
    unnamed = dict(bench_result().environment)
    del unnamed["driver"]
    other = read_measured(stored(bench_result(environment=unnamed), tmp_path / "b"))
    with pytest.raises(InputError, match=r"driver: .*not known"):
        compare_results(mine, other)


@pytest.mark.parametrize("change", [{"workload": "prefill"}, {"description": "long questions"}])
def test_other_requests_are_another_workload(change: dict[str, Any], tmp_path: Path):
    mine = read_measured(stored(bench_result(), tmp_path / "a"))
    other = read_measured(stored(bench_result(**change), tmp_path / "b"))
    with pytest.raises(InputError, match="workload"):
        compare_results(mine, other)


def test_a_folder_without_a_result_says_how_one_gets_there(tmp_path: Path):
    with pytest.raises(InputError, match=f"{tmp_path}: .*{RESULT_FILE}") as caught:
        read_measured(tmp_path)
    assert f"--resume --run-dir {tmp_path}" in str(caught.value.hint)


def test_the_folder_of_a_model_does_not_matter(tmp_path: Path):
    mine = read_measured(stored(with_environment(model="/models/x"), tmp_path / "a"))
    other = read_measured(stored(with_environment(model="/mnt/x"), tmp_path / "b"))
    assert not compare_results(mine, other).different


def named(*names: str) -> BenchResult:
    result = bench_result()
    sides = [dataclasses.replace(side, name=name) for side, name in zip(result.sides, names, strict=False)]
    return dataclasses.replace(result, sides=tuple(sides))


def test_sides_of_one_name_belong_together_wherever_they_stand(tmp_path: Path):
    mine = read_measured(stored(named("balanced", "stock"), tmp_path / "a"))
    other = read_measured(stored(named("stock vLLM"), tmp_path / "b"))
    assert {(row.side, row.second_side) for row in compare_results(mine, other).rows} == {("stock", "stock")}


def test_without_a_common_name_sides_are_compared_in_order_and_it_is_said(tmp_path: Path):
    mine = read_measured(stored(named("balanced"), tmp_path / "a"))
    other = read_measured(stored(named("aggressive"), tmp_path / "b"))
    assert "balanced of A beside aggressive of B" in render(compare_results(mine, other))


def test_what_only_one_file_has_is_said(tmp_path: Path):
    result = bench_result(clients=(1, 4))
    (profile, stock) = result.sides
    fewer = dataclasses.replace(stock, loads=(dataclasses.replace(stock.loads[0], tpot_ms=None),))
    mine = read_measured(stored(dataclasses.replace(result, sides=(profile, fewer)), tmp_path / "a"))
    other = read_measured(stored(dataclasses.replace(result, sides=(stock,)), tmp_path / "b"))
    found = compare_results(mine, other)
    whole, load, metric = found.left_out
    assert (whole.file, whole.side, whole.load) == (str(tmp_path / "a"), "balanced", None)
    assert (load.file, load.side, load.load, load.metric) == (str(tmp_path / "b"), "stock", "4 clients", None)
    assert (metric.load, metric.metric) == ("1 client", "tpot_ms")
    text = render(found)
    assert text.count("only in A") == 1
    assert text.count("only in B") == 2
    assert not compare_results(other, other).left_out


def test_results_without_a_common_load_are_refused(tmp_path: Path):
    mine = read_measured(stored(bench_result(clients=(1,)), tmp_path / "a"))
    other = read_measured(stored(bench_result(clients=(4,)), tmp_path / "b"))
    with pytest.raises(InputError, match="no side and load in common"):
        compare_results(mine, other)


def test_the_folder_of_a_run_is_read(tmp_path: Path):
    stored(bench_result(), tmp_path / RESULT_FILE)
    assert list(read_measured(tmp_path).values) == ["balanced", "stock"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"sides": [{"name": "a"}], "environment": {}, "workload": ""}'])
def test_what_is_no_result_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"a\.json"):
        read_measured(path)


def test_no_line_is_wider_than_80_columns(tmp_path: Path):
    clients = (1, 65536)
    mine = read_measured(stored(bench_result(clients=clients[:1]), tmp_path / "a"))
    text = render(compare_results(mine, mine))
    assert max(map(len, text.splitlines()[3:])) <= 80
