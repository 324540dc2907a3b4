"""What bench_layouts.py serves."""

from __future__ import annotations

import contextlib
import os
import sys

from benchmarks.serving import bench_layouts, together
from benchmarks.serving.layout_entries import groups, vllm_arguments
from moe_optimizer.measure.bench.side import RunningSide, Side


def test_a_layout_can_be_served_twice_with_other_arguments() -> None:
    (first, second), (alone,) = groups("tp4:0.3+tp4 --api-server-count 4,tp1x4", 8000)
    assert (first.name, second.name) == ("tp4", "tp4 --api-server-count 4")
    assert (first.share, second.share, alone.share) == (0.3, 0.45, 0.9)
    assert [each.port for each in (first, second, alone)] == [8000, 8010, 8020]
    assert second.slug == "tp4-api-server-count-4"
    given = vllm_arguments(second, ["--", "--max-model-len", "4096"])
    assert given == ["--", "--max-model-len", "4096", "--api-server-count", "4", "--gpu-memory-utilization", "0.45"]


def test_servers_that_start_at_once_keep_compiled_graphs_apart(monkeypatch, tmp_path) -> None:
    seen = []

    @contextlib.contextmanager
    def starting(side, **_given):
        seen.append((side.name, os.environ["VLLM_CACHE_ROOT"]))
        yield lambda: RunningSide(base_url="", model="m", max_model_len=1, ready_s=1.0, info=None)

    monkeypatch.setattr(together, "starting", starting)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/caches")
    sides = [Side(name=name, plan=None) for name in ("tp4", "tp4-api-server-count-4")]
    with together.started(sides, tmp_path, 1.0, {}) as up:
        assert os.environ["VLLM_CACHE_ROOT"] == "/caches"
        assert list(up) == [side.name for side in sides]
    assert seen == [(name, f"/caches/{name}") for name in ("tp4", "tp4-api-server-count-4")]


def test_what_did_not_start_beside_others_starts_alone(monkeypatch, tmp_path) -> None:
    tried = []

    def measured(group, _options, _vllm_args, *, end):
        del end
        tried.append([each.name for each in group])
        return {each.name: {"error": "ended", "loads": []} if len(group) > 1 else {"loads": []} for each in group}

    monkeypatch.setattr(bench_layouts, "measured", measured)
    monkeypatch.setattr(bench_layouts, "gpu_environment", dict)
    words = ["bench_layouts.py", "--model", "m", "--out", str(tmp_path / "r.json"), "--layouts", "tp4+tp2x2,tp1x4"]
    monkeypatch.setattr(sys, "argv", [*words, "--commit", "c"])
    assert bench_layouts.main() == 0
    assert tried == [["tp4", "tp2x2"], ["tp4"], ["tp2x2"], ["tp1x4"]]
