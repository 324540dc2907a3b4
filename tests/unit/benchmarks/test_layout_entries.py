"""What bench_layouts.py serves."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.serving import bench_layouts, together
from benchmarks.serving.layout_entries import groups, vllm_arguments
from moe_optimizer.measure.bench.samples import RoundSamples
from moe_optimizer.measure.bench.schedule import Turn
from moe_optimizer.measure.bench.side import RunningSide, Side
from moe_optimizer.measure.bench.trace import loads_of
from moe_optimizer.measure.bench.workload import load_workload
from moe_optimizer.plan.json_codec import encode
from tests.eventually import eventually


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


def load(clients: int, rounds: int, rate: float = 100.0) -> dict[str, Any]:
    """Return what a layout did with so many clients, as much of it as is read here."""
    return {
        "clients": clients, "rounds": rounds, "tpot_ms": {"median": 1.0}, "ttft_ms": {"median": 1.0},
        "output_tokens_per_s": rate,
    }  # fmt: skip


@pytest.fixture
def run_of(monkeypatch, tmp_path):
    """Return a function that runs the command with starts that find what is given, and returns its exit code, what was
    started with which clients, and the record's layouts.
    """

    def run(layouts, *starts, clients="1,16"):
        found, started = iter(starts), []

        def measured(group, asked, _options, _vllm_args, **_how):
            started.append(([each.name for each in group], asked))
            one = next(found)
            return {each.name: dict(one) for each in group}

        monkeypatch.setattr(bench_layouts, "measured", measured)
        monkeypatch.setattr(bench_layouts, "gpu_environment", dict)
        words = ["--model", "m", "--out", str(tmp_path / "r.json"), "--layouts", layouts, "--clients", clients]
        monkeypatch.setattr(sys, "argv", ["bench_layouts.py", *words, "--commit", "c"])
        code = bench_layouts.main()
        return code, started, json.loads((tmp_path / "r.json").read_text())["layouts"]

    return run


ALL = {"loads": [load(1, 2), load(16, 2)]}
LATE = {"error": "longer than 250 s", "log": {"err": "..."}}


def test_what_did_not_start_beside_others_starts_alone(run_of) -> None:
    code, started, _ = run_of("tp4+tp2x2,tp1x4", {"error": "ended", "loads": []}, ALL, ALL, ALL)
    assert code == 0
    assert [names for names, _ in started] == [["tp4", "tp2x2"], ["tp4"], ["tp2x2"], ["tp1x4"]]


def test_layouts_with_all_their_rounds_are_measured_although_their_time_was_over_while_they_stopped(run_of) -> None:
    code, _, layouts = run_of("tp4+tp4 --api-server-count 4", ALL | LATE)
    assert code == 0
    assert layouts == {"tp4": ALL, "tp4 --api-server-count 4": ALL}
    _, started, _ = run_of("tp4+tp4 --api-server-count 4")
    assert started == []


def test_the_same_command_again_measures_the_loads_that_lack_rounds_and_keeps_the_others(run_of) -> None:
    code, _, layouts = run_of("tp4", {"loads": [load(1, 2), load(16, 1)], **LATE})
    assert code == 1
    assert layouts["tp4"]["error"] == LATE["error"]
    code, started, layouts = run_of("tp4", {"loads": [load(16, 2, 120.0)]})
    assert (code, started) == (0, [(["tp4"], [16])])
    assert layouts["tp4"] == {"loads": [load(1, 2), load(16, 2, 120.0)], "clients_of_earlier_starts": [1]}


def test_a_later_start_that_was_cut_earlier_takes_no_rounds_away(run_of) -> None:
    run_of("tp4", {"loads": [load(16, 1)], **LATE})
    _, started, layouts = run_of("tp4", {"error": "not started: 3 s left", "loads": []})
    assert started == [(["tp4"], [1, 16])]
    assert layouts["tp4"]["loads"] == [load(16, 1)]


def test_the_record_has_the_rounds_in_which_nothing_compiled_or_failed_and_what_api_servers_took(tmp_path) -> None:
    options = argparse.Namespace(input_tokens=8, output_tokens=2, requests_per_client=1, repetitions=1)
    workload = tmp_path / "layouts.yaml"
    workload.write_text(bench_layouts.workload_text([1, 2, 3], options), encoding="utf-8")
    ends = ((0, ""), (3, ""), (0, "Cannot connect to host"))
    for turn, (compilations, error) in zip(loads_of(load_workload(str(workload))), ends, strict=True):
        samples = RoundSamples(
            duration_s=1.0, ttft_s=(0.1,), e2e_s=(0.2,), itl_s=(0.1,), input_tokens=(8,), output_tokens=(2,),
            errors=(error,), energy_j=None, compilations=compilations, api_servers_s=((0.25,),),
        )  # fmt: skip
        (tmp_path / f"{Turn(0, turn, 0).key}.json").write_text(json.dumps(encode(samples)), encoding="utf-8")
    found = bench_layouts.loads_measured(tmp_path, 0, workload, options)
    assert [each["clients"] for each in found] == [1]
    assert found[0]["api_servers"] == {
        "servers": 1, "processes": 1, "us_per_token": 125_000.0, "core_share": 0.25,
    }  # fmt: skip


LOADED = """
import os, pathlib, sys, time
folder, parent = pathlib.Path(sys.argv[1]), os.getppid()
folder.mkdir()
for clients in (1, 16):
    (folder / f"side-0_{clients}.json").write_text("{}")
while os.getppid() == parent:
    time.sleep(0.1)
"""
"""Measures two loads at once, and does not end by itself."""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_killed_has_its_loads_in_the_record(how: signal.Signals, tmp_path) -> None:
    program = f"""
import json, pathlib, sys
sys.path.insert(0, {str(bench_layouts.ROOT)!r})
from benchmarks.serving import bench_layouts as b
loader = pathlib.Path({str(tmp_path)!r}) / "loader.py"
loader.write_text({LOADED!r})
b.LOOK_S, b.TOGETHER = 0.1, loader
b.gpu_environment = dict
def plan(entry, options, vllm_args, folder):
    path = folder / "p.json"
    path.write_text(json.dumps({{"serve_args": []}}))
    return path
b.write_plan = plan
def loads(run, number, workload, options):
    names = sorted(path.stem for path in run.glob("side-*.json"))
    return [{{"clients": int(each.rpartition("_")[2]), "rounds": 1, "tpot_ms": {{"median": 1.0}},
             "ttft_ms": {{"median": 1.0}}, "output_tokens_per_s": 1.0}} for each in names]
b.loads_measured = loads
sys.argv = ["b", "--model", "m", "--out", {str(tmp_path / "r.json")!r}, "--layouts", "tp2,tp1x2"]
sys.argv += ["--clients", "1,16,128", "--repetitions", "1", "--commit", "c"]
sys.exit(b.main())
"""
    record = tmp_path / "r.json"
    # The folder of a run that failed is kept.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, env=environment) as process:
        try:
            assert eventually(lambda: record.exists() and '"clients": 16' in record.read_text())
            process.send_signal(how)
            assert process.wait(120) != 0
        finally:
            process.kill()
    found = json.loads(record.read_text())["layouts"]
    assert list(found) == ["tp2"]
    assert [each["clients"] for each in found["tp2"]["loads"]] == [1, 16]
    assert ("SIGTERM" in found["tp2"]["error"]) == (how is signal.SIGTERM)
