"""Turns benchmark records into the kernel speed tables that ship in configs/kernel_speeds.

    python scripts/write_kernel_speeds.py [RECORD...]

Without arguments it reads every record of the CUDA benchmark. The tables of a record apply to its commit's kernels and
to sources that compile to the same kernels for their weights (compare_kernels.py records those). Plans ignore tables
for other kernels. If two records have the same layer, the later one is taken.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_optimizer.inspection.kernel_speeds import shipped_dir, write_tables  # noqa: E402
from moe_optimizer.specs.kernel_speeds import STOCK, KernelSpeeds, LayerShape, TokenSpeeds  # noqa: E402

RECORDS = ROOT / "benchmarks" / "records"
_INT4 = ("int4_g32", "int4_g128")
_ZERO_POINTS = "z"
"""Ends the name of INT4 weights that have them: the same kernels."""
_WEIGHTS = {"bf16": "bf16", "fp8": "fp8_block", "mxfp4": "mxfp4", **{name: name for name in _INT4}}
_WEIGHTS |= {name + _ZERO_POINTS: name + _ZERO_POINTS for name in _INT4}
"""The benchmark's name -> that of the tables."""
MXFP4_IN_E4M3 = "mxfp4 in E4M3"
"""Kernels of MXFP4 that a table can do without: plans take them only where activations may be rounded."""
TABLES = (*(name for name in _WEIGHTS.values() if not name.endswith(_ZERO_POINTS)), MXFP4_IN_E4M3)
_IN_E4M3 = "grouped-mxfp4-"
_FEWEST = 4
"""Numbers of tokens in a table, at least: what lies far from all that were timed is better measured at the start."""
_STOCK = "vllm"
_GPT_OSS = "gpt-oss"
"""Begins the names of layers that vLLM gives to the package triton_kernels. Where that was not timed, a record has
Marlin in its place, which vLLM takes without that package.
"""
_CHOICE = "choice of experts"
"""The side that is in the time of triton_kernels, which gets logits, and not in that of our kernels, which get ids. A
record without it timed triton_kernels otherwise than vLLM calls it.
"""
_EVEN = "uniform"
"""Of the routings that were timed, the one in which all experts are equally likely."""
_OURS = ("direct", "grouped-")
"""First letters of our variants' names; the other timings are of vLLM's kernels, or of more than the experts."""
_PEERS = ("deep_gemm",)
"""Sides that are another backend of vLLM's, under the name of --moe-backend."""


def main(arguments: list[str]) -> int:
    """Write one file per device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", metavar="RECORD", nargs="*", type=Path)
    paths = parser.parse_args(arguments).records or sorted(RECORDS.glob("*.json"))
    records = {path: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    found = {path: record for path, record in records.items() if holds_tables(record)}
    newest: dict[str, dict[tuple[Any, ...], KernelSpeeds]] = {}
    for path in sorted(found, key=lambda path: _commit_time(found[path]["commit"])):
        for table in tables_of(found[path], path):
            key = (table.weights, table.shape, table.kernel_hash, table.vllm)
            newest.setdefault(table.device, {})[key] = table
    for device, tables in newest.items():
        path = shipped_dir() / f"{device.lower().replace(' ', '_')}.json"
        current = tuple(table for table in _of_the_last_kernels(tuple(tables.values())) if len(table.rows) >= _FEWEST)
        write_tables(path, current)
        path.chmod(0o644)
        print(f"{path.relative_to(ROOT)}: {len(current)} tables, kernels {current[0].kernel_hash[:12]}")
    return 0


def holds_tables(record: dict[str, Any]) -> bool:
    """Whether a record is of our CUDA kernels and vLLM's. One of other libraries has too few routings for a table."""
    cases = record.get("cases") or []
    timed = record["environment"].get("multiprocessors") and cases and _STOCK in cases[0].get("sides", {})
    return bool(timed and "peer" not in cases[0])


def _commit_time(commit: str) -> int:
    shown = subprocess.run(["git", "log", "-1", "--format=%ct", commit], cwd=ROOT, capture_output=True, check=True)
    return int(shown.stdout)


def _of_the_last_kernels(tables: tuple[KernelSpeeds, ...]) -> tuple[KernelSpeeds, ...]:
    """Leave out tables of earlier kernels: plans ignore them."""
    return tuple(table for table in tables if table.kernel_hash == tables[-1].kernel_hash)


def tables_of(record: dict[str, Any], path: Path) -> list[KernelSpeeds]:
    """Return one table per layer shape and weights of a record.

    Real traffic lies between the routings that were timed at a number of tokens: times are geometric means over them,
    and a variant of ours is listed only if it was slower than vLLM's kernel in none of them.
    """
    measured = record.get("cuda_sources") or sources_at(record["commit"])
    environment = record["environment"]
    driver = environment["nvidia_smi"].split(",")[1].strip()
    timed: dict[tuple[str, str], dict[int, dict[str, TokenSpeeds]]] = {}
    shapes: dict[str, dict[str, Any]] = {}
    in_e4m3 = same_kernels(MXFP4_IN_E4M3).get(measured, measured)
    for case in record["cases"]:
        if _STOCK not in case["sides"] or case["dtype"] not in _WEIGHTS:
            continue
        if case["shape"]["name"].startswith(_GPT_OSS) and case["dtype"] == "mxfp4" and not _is_traffic(case, record):
            continue
        if in_e4m3 != same_kernels(_WEIGHTS[case["dtype"]]).get(measured, measured):
            sides = {name: side for name, side in case["sides"].items() if not name.startswith(_IN_E4M3)}
            case = case | {"sides": sides}  # noqa: PLW2901 - without what others have changed since
        shapes[case["shape"]["name"]] = case["shape"]
        of_layer = timed.setdefault((case["shape"]["name"], case["dtype"]), {})
        of_layer.setdefault(case["tokens"], {})[case["routing"]] = _row(case)
    most = max(map(len, timed.values()), default=0)
    return [
        KernelSpeeds(
            device=environment["device"],
            weights=_WEIGHTS[dtype],
            shape=_shape(shapes[name]),
            kernel_hash=same_kernels(_WEIGHTS[dtype]).get(measured, measured),
            vllm=environment["vllm"].partition("+")[0],
            driver=driver,
            rows=tuple(_over_routings(of_layer[tokens]) for tokens in sorted(of_layer)),
            source=f"benchmarks/records/{path.name}",
            torch=environment["torch"],
        )
        for (name, dtype), of_layer in timed.items()
        if 2 * len(of_layer) >= most  # of less the time was over: no table
    ]


def _is_traffic(case: dict[str, Any], record: dict[str, Any]) -> bool:
    """Whether gpt-oss's layer was timed as vLLM calls its kernel, and not evenly routed alone: by what AIConfigurator
    0.12 publishes of triton_kernels, uneven routing takes 1.06 to 1.16 times as long at 256 to 2048 tokens.
    """
    routings = {each["routing"] for each in record["cases"] if each["shape"] == case["shape"]}
    return _CHOICE in case["sides"] and routings != {_EVEN}


def _row(case: dict[str, Any]) -> TokenSpeeds:
    times = {name: round(side["median_us"], 2) for name, side in case["sides"].items()}
    ours = {name: time for name, time in times.items() if name.startswith(_OURS)}
    peers = {name: times[name] for name in _PEERS if name in times}
    stock_us = round(times[_STOCK] - times.get(_CHOICE, 0.0), 2)
    return TokenSpeeds(tokens=case["tokens"], stock_us=stock_us, ours_us=ours, peers_us=peers)


def _over_routings(timed: dict[str, TokenSpeeds]) -> TokenSpeeds:
    """Return one row for the routings of one number of tokens: geometric means.

    Where every variant of ours is slower in one of them, each is listed with as much more than vLLM's time as in the
    routing that is its worst.
    """
    rows = list(timed.values())
    even = timed.get(_EVEN) if len(timed) > 1 else None
    in_all = sorted(set.intersection(*(set(row.ours_us) for row in rows)))
    holding = [name for name in in_all if all(row.ours_us[name] <= row.stock_us for row in rows)]
    stock_us = geometric_mean(row.stock_us for row in rows)

    def ours(name: str, stock_us: float, times: Sequence[float]) -> float:
        slower = max(row.ours_us[name] / row.stock_us for row in rows)
        return round(geometric_mean(times) if holding else slower * stock_us, 2)

    return TokenSpeeds(
        tokens=rows[0].tokens,
        stock_us=round(stock_us, 2),
        ours_us={name: ours(name, stock_us, [row.ours_us[name] for row in rows]) for name in holding or in_all},
        peers_us={
            name: round(geometric_mean(row.peers_us[name] for row in rows), 2)
            for name in _PEERS
            if all(name in row.peers_us for row in rows)
        },
        even_us={}
        if even is None
        else {
            STOCK: even.stock_us,
            **{name: ours(name, even.stock_us, [even.ours_us[name]]) for name in holding or in_all},
        },
    )


def _shape(shape: dict[str, Any]) -> LayerShape:
    return LayerShape(
        hidden_size=shape["hidden"],
        intermediate_size=shape["width"],
        num_experts=shape["experts"],
        num_global_experts=shape.get("global_experts") or shape["experts"],
        top_k=shape["top_k"],
    )


@functools.cache
def same_kernels(weights: str) -> dict[str, str]:
    """Return, for sources that compile to later ones' kernels for these weights, the hash of the last of those."""
    newest: dict[str, str] = {}
    weights = weights.removesuffix(_ZERO_POINTS)
    for path in sorted(RECORDS.glob("*_same_kernels.json")):
        trees = json.loads(path.read_text(encoding="utf-8"))["trees"]
        last, *others = (tree["cuda_sources"] for tree in trees if weights not in tree.get("without", ()))
        for earlier, then in newest.items():
            newest[earlier] = last if then in others else then
        newest |= dict.fromkeys(others, last)
    return newest


def sources_at(commit: str) -> str:
    """Return the hash of the CUDA kernels' sources as they were at a commit."""
    archive = subprocess.run(["git", "archive", commit, "csrc"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
        return build_info().device_sources("cuda", Path(folder) / "csrc")


def build_info() -> ModuleType:
    """Return csrc/build_info.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("build_info", ROOT / "csrc" / "build_info.py")
    assert spec is not None, "csrc/build_info.py"
    assert spec.loader is not None, "csrc/build_info.py"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
