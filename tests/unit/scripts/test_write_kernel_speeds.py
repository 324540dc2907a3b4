"""The shipped tables of kernel speeds are what their records say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moe_optimizer.inspection.kernel_speeds import read_tables, shipped_dir

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "write_kernel_speeds.py"
    spec = importlib.util.spec_from_file_location("write_kernel_speeds", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(**changes: Any) -> dict[str, Any]:
    sides = {"vllm": 30.0, "vllm gate+experts": 33.0, "deep_gemm": 20.0, "direct": 25.0, "grouped-bf16-n16": 40.0}
    case = {
        "shape": {"name": "layer", "hidden": 64, "width": 32, "experts": 8, "top_k": 2},
        "dtype": "bf16",
        "routing": "uniform",
        "tokens": 8,
        "sides": {name: {"median_us": time} for name, time in sides.items()},
    }
    fields = {
        "cases": [case, {**case, "tokens": 1}, {**case, "routing": "zipf"}],
        "cuda_sources": "abc",
        "environment": {
            "nvidia_smi": "NVIDIA H200, 580.1, 1980 MHz",
            "device": "NVIDIA H200",
            "vllm": "0.26.0+cu130",
            "torch": "2.11.0",
        },
    }
    return fields | changes


def test_only_our_variants_stand_beside_vllms_kernel(script: ModuleType) -> None:
    (table,) = script.tables_of(record(), Path("benchmarks/records/some.json"))
    assert (table.kernel_hash, table.vllm, table.driver) == ("abc", "0.26.0", "580.1")
    assert [row.tokens for row in table.rows] == [1, 8]
    assert table.rows[0].stock_us == 30.0
    assert table.rows[0].ours_us == {"direct": 25.0}


def test_a_layer_for_which_the_time_was_over_is_no_table(script: ModuleType) -> None:
    made = record()
    first = made["cases"][0]
    whole = [{**first, "tokens": tokens} for tokens in (1, 8, 64)]
    tables = script.tables_of(made | {"cases": [*whole, {**first, "dtype": "fp8"}]}, Path("benchmarks/records/a.json"))
    assert [table.weights for table in tables] == ["bf16"]


@pytest.mark.parametrize("layer", ["gpt-oss-120b", "gpt-oss-20b"])
def test_a_layer_that_was_timed_beside_a_kernel_that_vllm_does_not_take_is_no_table(
    layer: str, script: ModuleType
) -> None:
    made = record()
    first: dict[str, Any] = made["cases"][0]
    of_gpt_oss: dict[str, Any] = {**first, "shape": {**first["shape"], "name": layer}, "dtype": "mxfp4"}
    path = Path("benchmarks/records/a.json")
    assert script.tables_of(made | {"cases": [of_gpt_oss]}, path) == []
    # Its time has the choice of experts in it, which our kernels are given.
    with_choice = {**of_gpt_oss, "sides": {**of_gpt_oss["sides"], "choice of experts": {"median_us": 4.5}}}
    assert script.tables_of(made | {"cases": [with_choice]}, path) == []
    (table,) = script.tables_of(made | {"cases": [with_choice, {**with_choice, "routing": "zipf"}]}, path)
    assert table.rows[0].stock_us == of_gpt_oss["sides"]["vllm"]["median_us"] - 4.5
    assert len(script.tables_of(made | {"cases": [{**first, "dtype": "mxfp4"}]}, path)) == 1


def test_kernels_in_e4m3_that_changed_since_are_left_out_of_a_table_of_mxfp4(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "same_kernels", lambda weights: {"abc": "now"} if weights == "mxfp4" else {})
    made = record()
    case: dict[str, Any] = made["cases"][0]
    sides = {name: {"median_us": 20.0} for name in ("grouped-mxfp4-n64", "grouped-mxfp4_weights-n16")}
    case = {**case, "dtype": "mxfp4", "sides": {**case["sides"], **sides}}
    (table,) = script.tables_of(made | {"cases": [case]}, Path("benchmarks/records/a.json"))
    assert table.kernel_hash == "now"
    assert table.rows[0].ours_us.keys() == {"direct", "grouped-mxfp4_weights-n16"}


def test_every_shipped_table_has_several_numbers_of_tokens() -> None:
    shipped = [table for path in shipped_dir().glob("*.json") for table in read_tables(path)]
    assert len(shipped) > 20
    assert [table.source for table in shipped if len(table.rows) < 4] == []


def test_every_shipped_table_is_in_its_record(script: ModuleType) -> None:
    for path in sorted(shipped_dir().glob("*.json")):
        for table in read_tables(path):
            source = ROOT / table.source
            assert table in script.tables_of(json.loads(source.read_text()), source), (table.source, table.shape)


@pytest.mark.parametrize(
    ("subject", "holds"), [("2026-11-22_h100_fused_experts", True), ("2026-11-25_h100_peers", False)]
)
def test_a_record_of_other_libraries_holds_no_tables(subject: str, holds: bool, script: ModuleType) -> None:
    record = json.loads((ROOT / "benchmarks" / "records" / f"{subject}.json").read_text())
    assert script.holds_tables(record) == holds


def with_times(case: dict[str, Any], **times: float) -> dict[str, Any]:
    named = {name.replace("_", "-"): {"median_us": time} for name, time in times.items()}
    return {**case, "sides": case["sides"] | named}


def test_times_are_geometric_means_over_the_routings_of_variants_that_are_slower_in_none(script: ModuleType) -> None:
    made = record()
    uniform, _, zipf = made["cases"]
    uniform = with_times(uniform, direct=20.0, grouped_bf16_n16=10.0)
    skewed = with_times(zipf, vllm=43.2, direct=28.8, grouped_bf16_n16=43.3)
    for cases in ([uniform, skewed], [skewed, uniform]):
        (table,) = script.tables_of(made | {"cases": cases}, Path("benchmarks/records/some.json"))
        (row,) = table.rows
        assert (row.tokens, row.stock_us, row.ours_us) == (8, 36.0, {"direct": 24.0})
        assert row.even_us == {"stock": 30.0, "direct": 20.0}


def test_times_of_even_routing_alone_are_not_kept_twice(script: ModuleType) -> None:
    made = record()
    (table,) = script.tables_of(made | {"cases": made["cases"][:2]}, Path("benchmarks/records/some.json"))
    assert all(row.even_us == {} for row in table.rows)


def test_where_no_variant_holds_in_every_routing_each_is_as_much_slower_as_in_its_worst(script: ModuleType) -> None:
    """And vLLM's time is a mean as at other numbers of tokens: one routing's alone would be a dip between two means."""
    made = record()
    uniform, _, zipf = made["cases"]
    faster = with_times(uniform, vllm=40.0, direct=20.0, grouped_bf16_n16=44.0)
    slower = with_times(zipf, vllm=10.0, direct=11.0, grouped_bf16_n16=5.0)
    for cases in ([faster, slower], [slower, faster]):
        (table,) = script.tables_of(made | {"cases": cases}, Path("benchmarks/records/some.json"))
        (row,) = table.rows
        assert row.stock_us == 20.0
        assert row.ours_us == {"direct": 22.0, "grouped-bf16-n16": 22.0}
        assert row.even_us == {"stock": 40.0, "direct": 44.0, "grouped-bf16-n16": 44.0}
