from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks import keep, record
from moe_optimizer.measure.report.comparison import read_measured
from moe_optimizer.plan.json_codec import encode
from tests.builders.results import bench_result


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.0GHz", "xeon-platinum-8480c"),
        ("AMD EPYC 9654 96-Core Processor", "epyc-9654"),
        ("", "cpu"),
    ],
)
def test_the_processors_name_becomes_part_of_a_file_name(name: str, slug: str) -> None:
    assert record.cpu_slug(name) == slug


def test_a_checkout_that_git_cannot_read_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.checkout() == {"commit": None, "dirty": None}


@pytest.mark.parametrize(("changed", "dirty"), [("benchmarks/records/a.json", False), ("code.py", True)])
def test_a_record_that_goes_on_does_not_make_its_sources_dirty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str, dirty: bool
) -> None:
    """A benchmark that is stopped and resumed finds its own record changed."""
    monkeypatch.setattr(record, "ROOT", tmp_path)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for name in ("benchmarks/records/a.json", "code.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / changed).write_text("2")
    assert record.checkout()["dirty"] is dirty


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)  # a signal is not handled at once


def failed() -> None:
    raise KeyError("what a case lacks")


@pytest.mark.parametrize(("end", "raised"), [(stopped, SystemExit), (failed, KeyError)], ids=["SIGTERM", "error"])
def test_what_was_timed_is_kept_however_a_benchmark_ends(
    end: Callable[[], None], raised: type[BaseException], tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    facts: dict[str, Any] = {"cases": []}

    def benchmark() -> None:
        with record.kept(facts, "test", out=tmp_path / "record.json", write=False):
            facts["cases"].append(1)
            end()

    with pytest.raises(raised):
        benchmark()
    assert json.loads((tmp_path / "record.json").read_text()) == {"cases": [1]}
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_named_commit_keeps_its_dirty_mark() -> None:
    assert record.checkout("abc") == {"commit": "abc", "dirty": False}
    assert record.checkout("abc+dirty") == {"commit": "abc", "dirty": True}


def test_a_record_is_written_under_its_date_machine_and_subject(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "RECORDS", tmp_path / "records")
    record.write_record({"date": "2026-11-20"}, "epyc", "cli_startup")
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["2026-11-20_epyc_cli_startup.json"]


def test_a_record_says_how_it_was_made_and_not_where(monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(record.ROOT / "benchmarks" / "cli_startup.py")
    given = ["--out", "/somewhere/out/a.json", "--out=/somewhere/b.json", "--model", str(record.ROOT / "examples")]
    monkeypatch.setattr("sys.argv", [script, *given, "-v", "1", "relative/c"])
    assert record.command_line() == [
        "python", "benchmarks/cli_startup.py", "--out", "a.json", "--out=b.json", "--model", "examples", "-v", "1",
        "relative/c",
    ]  # fmt: skip


def test_a_system_is_named_without_who_built_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.18.44-builder-v1-gpu")
    assert re.fullmatch(r"\w+ 6\.18\.44, \S+ [\d.]+", record.system_name())


@pytest.mark.parametrize("path", sorted(record.RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_no_record_names_a_place_on_the_machine_that_made_it(path: Path) -> None:
    found = re.findall(r'"(?:[-\w]+=)?/\w+/[^"]*"|"Linux-[^"]*"', path.read_text(encoding="utf-8"))
    assert found == []


SCHEMA = json.loads((record.ROOT / "benchmarks" / "record.schema.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sorted(record.RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_every_record_says_how_it_was_made_and_on_what(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = json.loads(text)
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert path.name.startswith(found["date"])
    commits = set(re.findall(r'"commit": "([0-9a-f]{7,40})"', text))
    # Before that day some were measured with changes in the tree, and say so.
    assert found["date"] < "2026-11-23" or (found["dirty"] is False and commits)


def test_a_result_of_bench_is_kept_as_a_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = tmp_path / "bench.json"
    result.write_text(json.dumps(encode(bench_result()) | {"workload": str(tmp_path / "chat.yaml")}))
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "RECORDS", tmp_path / "records")
    words = [
        str(result),
        "--machine",
        "h100",
        "--subject",
        "served",
        "--commit",
        "abcdef1",
        "--note",
        "on a busy machine",
    ]
    monkeypatch.setattr("sys.argv", ["keep.py", *words])
    assert keep.main() == 0
    (path,) = (tmp_path / "records").iterdir()
    assert path.name == "2026-11-22_h100_served.json"
    found = json.loads(path.read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert (found["workload"], found["note"]) == ("chat.yaml", "on a busy machine")
    assert read_measured(path).values == read_measured(result).values


LAYOUTS = {
    "what": "layouts",
    "date": "2026-11-26",
    "command": ["python", "benchmarks/serving/bench_layouts.py", "--layouts", "tp2"],
    "commit": "abcdef0",
    "dirty": False,
    "environment": {"device": "NVIDIA H100"},
    "model": "mixtral",
    "workload": {"input_tokens": 512},
    "layouts": {"tp2": {"loads": [{"clients": 1}], "log": {"err": "its end"}}},
}
STARTS = {**LAYOUTS, "what": "starts", "starts": [{"side": "ours", "ready_s": 48.0}]}
STARTS = {key: value for key, value in STARTS.items() if key not in ("layouts", "model", "workload")}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "RECORDS", tmp_path / "records")

    def keep_all(*results: dict[str, Any], words: Sequence[str] = ()) -> dict[str, Any]:
        paths = [tmp_path / f"{number}.json" for number in range(len(results))]
        for path, result in zip(paths, results, strict=True):
            path.write_text(json.dumps(result))
        named = ["--machine", "h100_x2", "--subject", "some", *words]
        monkeypatch.setattr("sys.argv", ["keep.py", *map(str, paths), *named])
        assert keep.main() == 0
        (written,) = (tmp_path / "records").iterdir()
        assert written.name == "2026-11-26_h100_x2_some.json"
        found: dict[str, Any] = json.loads(written.read_text())
        jsonschema.Draft202012Validator(SCHEMA).validate(found)
        return found

    return keep_all


def test_a_file_of_layouts_is_kept_as_it_is_without_logs(kept: Callable[..., dict[str, Any]]) -> None:
    found = kept(LAYOUTS, words=["--note", "alone"])
    assert found == LAYOUTS | {"layouts": {"tp2": {"loads": [{"clients": 1}]}}, "note": "alone"}
    assert kept(LAYOUTS, words=["--commit", "1234567+dirty"])["dirty"] is True


def test_several_files_of_layouts_or_of_starts_become_one_record(kept: Callable[..., dict[str, Any]]) -> None:
    other = LAYOUTS | {"layouts": {"tp1x2": {"loads": []}}, "command": ["python", "b"]}
    found = kept(LAYOUTS, other)
    assert list(found["layouts"]) == ["tp2", "tp1x2"]
    assert found["further_commands"] == [["python", "b"]]
    found = kept(STARTS, STARTS | {"starts": [{"side": "vllm", "ready_s": 56.0}]})
    assert [start["side"] for start in found["starts"]] == ["ours", "vllm"]
    steps = {**STARTS, "remarks": ["stock vLLM: shorter"], "sides": {"stock": {"ledgers": []}}}
    del steps["starts"]
    found = kept(steps, steps | {"remarks": [], "sides": {"ours": {"ledgers": []}}})
    assert (list(found["sides"]), found["remarks"]) == (["stock", "ours"], ["stock vLLM: shorter"])


@pytest.mark.parametrize("change", [{"commit": "1234567"}, {"environment": {"device": "NVIDIA H200"}}, {}])
def test_what_does_not_belong_together_is_not_joined(
    kept: Callable[..., dict[str, Any]], change: dict[str, Any]
) -> None:
    # The third holds the same layout again.
    with pytest.raises(SystemExit, match="hint:"):
        kept(LAYOUTS, LAYOUTS | change)


@pytest.mark.parametrize(("gpu", "device"), [("NVIDIA H100", "NVIDIA H100"), (None, record.cpu_name())])
def test_servers_of_a_machine_without_gpus_ran_on_its_processor(
    gpu: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "gpu_environment", lambda: {"device": gpu, "torch": "2"})
    found = record.environment()
    assert found["device"] == device
    assert ("cores" in found) == (gpu is None)


def test_a_record_of_kernels_is_on_disk_after_each_case(tmp_path: Path) -> None:
    out, facts = tmp_path / "record.json", {"cases": [1]}
    with record.kept(facts, "some", out=out, write=False) as save:
        save()
        assert json.loads(out.read_text()) == {"cases": [1]}
        facts["cases"].append(2)
    assert json.loads(out.read_text()) == {"cases": [1, 2]}
