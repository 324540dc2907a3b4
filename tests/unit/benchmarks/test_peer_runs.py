"""Kernels of other libraries are timed in processes of their own: whatever happens there is a row with its reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "ops" / "bench_cuda_peer_runs.py"


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmarks' modules be imported as their scripts import them."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark where there is no GPU for it."""
    command = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
    hidden = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=hidden)


def rows_of(out: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return the rows of a record by peer, format and number of tokens."""
    cases = json.loads((out / "record.json").read_text())["cases"]
    return {(case["peer"], case["dtype"], case["tokens"]): case for case in cases}


@pytest.fixture(scope="module")
def absent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return the folder of a run in which no peer could be timed, and how it ended."""
    out = tmp_path_factory.mktemp("peers")
    arguments = ("--peers", "quack,humming", "--shapes", "qwen3-30b-a3b", "--dtypes", "bf16", "--tokens", "1,16")
    return out, run(out, *arguments)


def test_a_peer_that_cannot_run_is_a_row_for_each_number_of_tokens(
    absent: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    rows = rows_of(absent[0])
    assert set(rows) == {(peer, "bf16", tokens) for peer in ("quack", "humming") for tokens in (1, 16)}
    assert "GPU" in rows["quack", "bf16", 16]["absent"]["quack"]
    assert "bf16" in rows["humming", "bf16", 1]["absent"]["humming"]


def test_a_run_in_which_a_peer_was_never_timed_says_so_in_its_exit_code(
    absent: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    assert absent[1].returncode == 4


def test_rows_of_an_earlier_run_stay_unless_their_peer_and_format_are_run_again(
    absent: tuple[Path, subprocess.CompletedProcess[str]], ops: None
) -> None:
    import bench_cuda_peer_runs

    _, rows = bench_cuda_peer_runs.kept(absent[0], {("quack", "qwen3-30b-a3b", "bf16")})
    assert {row["peer"] for row in rows} == {"humming"}


def test_an_unknown_peer_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    ended = run(tmp_path, "--peers", "hummingbird")
    assert ended.returncode == 2
    assert "hummingbird" in ended.stderr
    assert "flashinfer_cutlass" in ended.stderr


def test_what_a_process_timed_before_it_was_killed_is_kept(tmp_path: Path, ops: None) -> None:
    import bench_cuda_peer_runs

    side = {"median_us": 20.123, "min_us": 20.0, "max_us": 20.5, "samples_us": [20.123] * 7}
    case = {"shape": {"name": "qwen3-30b-a3b"}, "dtype": "fp8", "routing": "uniform", "tokens": 4, "floor_us": 10.0,
            "sides": {"humming": side}, "errors": {"humming": 0.01}, "absent": {}}  # fmt: skip
    folder = tmp_path / "humming-qwen3-30b-a3b-fp8"
    folder.mkdir()
    (folder / "timings.jsonl").write_text(json.dumps(case) + "\n")
    rows = bench_cuda_peer_runs.rows_of(("humming", "qwen3-30b-a3b", "fp8", "too slow"), [4, 16], folder)
    bench_cuda_peer_runs.write_record(tmp_path, {}, rows)
    found = rows_of(tmp_path)
    assert found["humming", "fp8", 4]["sides"]["humming"]["median_us"] == pytest.approx(20.12)
    assert found["humming", "fp8", 16]["absent"] == {"humming": "too slow"}


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (5, 3, 3), (40, 16, 4)])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_each_pair_lies_once_in_a_block_of_its_expert(
    ops: None, tokens: int, experts: int, top_k: int, size: int
) -> None:
    from bench_cuda_pairs import pair_order

    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    order = pair_order(ids, experts)
    pairs, expert_of_block, length = order.blocks(size)
    assert int(length) == pairs.numel() == expert_of_block.numel() * size
    blocks = pairs.view(-1, size)
    for expert, block in zip(expert_of_block.tolist(), blocks.tolist(), strict=True):
        assert all(ids.flatten()[pair] == expert for pair in block if pair < ids.numel())
    assert sorted(pair for pair in pairs.tolist() if pair < ids.numel()) == list(range(ids.numel()))
    rows = order.rows_of_pairs(order.aligned_offsets(size))
    assert torch.equal(pairs[rows].long(), torch.arange(ids.numel()))
