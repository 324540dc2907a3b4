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
        "nvidia_smi": "NVIDIA H200, 580.1, 1980 MHz",
        "device": "NVIDIA H200",
        "vllm": "0.26.0+cu130",
        "torch": "2.11.0",
    }
    return fields | changes


def test_only_our_variants_stand_beside_vllms_kernel(script: ModuleType) -> None:
    (table,) = script.tables_of(record(), Path("benchmarks/records/some.json"))
    assert (table.kernel_hash, table.vllm, table.driver) == ("abc", "0.26.0", "580.1")
    assert [row.tokens for row in table.rows] == [1, 8]
    assert table.rows[0].stock_us == 30.0
    assert table.rows[0].ours_us == {"direct": 25.0, "grouped-bf16-n16": 40.0}


def test_every_shipped_table_is_in_its_record(script: ModuleType) -> None:
    for path in sorted(shipped_dir().glob("*.json")):
        for table in read_tables(path):
            source = ROOT / table.source
            assert table in script.tables_of(json.loads(source.read_text()), source), (table.source, table.shape)


def test_the_routing_in_which_ours_gains_least_counts(script: ModuleType) -> None:
    made = record()
    uniform, _, zipf = made["cases"]
    slower = {**zipf, "sides": zipf["sides"] | {"direct": {"median_us": 31.0}, "grouped-bf16-n16": {"median_us": 32.0}}}
    for cases in ([uniform, slower], [slower, uniform]):
        (table,) = script.tables_of(made | {"cases": cases}, Path("benchmarks/records/some.json"))
        assert [(row.tokens, row.ours_us["direct"]) for row in table.rows] == [(8, 31.0)]
