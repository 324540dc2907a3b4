"""Servers beside each other under `bench`: starts and loads are stand-ins."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import bench_beside, together
from benchmarks.serving.bench_beside import benches_of, words_of
from moe_optimizer.errors import RequiredNotAppliedError, ServerFailedError
from moe_optimizer.measure.bench.result import RESULT_FILE
from moe_optimizer.measure.bench.side import RunningSide, Side
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.json_codec import encode
from tests.builders.results import bench_result

TINY_MOE = Path(__file__).resolve().parents[3] / "examples" / "tiny-moe"


def test_a_side_is_a_name_a_model_passes_and_arguments_of_its_own() -> None:
    words = words_of("ours 'a folder' +four_bit -expert_load -cc.mode=0 @a.yaml gpus=2,3 --seed 1")
    assert (words.name, words.model, words.profile) == ("ours", "a folder", "a.yaml")
    assert words.environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert words_of("ours folder").profile == "balanced"
    assert words_of("ours folder").environment == {}
    assert words.wishes == {"four_bit": Wish.ON, "expert_load": Wish.OFF}
    assert words.vllm_args == ("-cc.mode=0", "--seed", "1")


def test_only_what_has_a_plus_is_required_of_a_side() -> None:
    words = words_of("ours folder +four_bit ~skinny_gemm -expert_load")
    assert words.wishes == {"four_bit": Wish.ON, "skinny_gemm": Wish.ON, "expert_load": Wish.OFF}
    assert words.required == {"four_bit"}


def test_a_side_without_a_plan_leaves_the_others_and_a_record_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(words: bench_beside.Words, *_: Any) -> Side:
        if words.name == "broken":
            raise RequiredNotAppliedError("it is refused")
        return Side(name=words.name, plan=None)

    monkeypatch.setattr(bench_beside, "side_of", refused)
    failed: dict[str, str] = {}
    sides = [words_of("broken folder"), words_of("ours folder")]
    assert [side.name for side in bench_beside.planned(sides, 8, (), failed)] == ["ours"]
    assert failed == {"broken": "it is refused"}
    out = tmp_path / "record.json"
    assert bench_beside.main(["--out", str(out), "--side", "broken folder", "--commit", "none"]) == 1
    assert json.loads(out.read_text(encoding="utf-8"))["not_started"] == failed


def test_a_pass_that_there_is_not_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="fourbit"):
        words_of("ours folder +fourbit")


@pytest.mark.parametrize(
    ("names", "pairs"),
    [(["one"], [("one",)]), (["one", "two", "three"], [("one", "two"), ("one", "three")]), ([], [])],
)
def test_the_first_is_measured_beside_each_of_the_others(names: list[str], pairs: list[tuple[str, ...]]) -> None:
    asked = benches_of(names, ["a", "b"], ["1", "16"])
    assert asked == [(pair, load, each) for load in ("a", "b") for each in ("1", "16") for pair in pairs]


def test_a_side_that_does_not_start_leaves_the_others_to_be_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started_on: dict[str, str | None] = {}

    @contextlib.contextmanager
    def starting(side: Side, **_: Any) -> Iterator[Callable[[], RunningSide]]:
        started_on[side.name] = os.environ.get("CUDA_VISIBLE_DEVICES")

        def wait() -> RunningSide:
            if side.name == "broken":
                raise ServerFailedError("it ended")
            return RunningSide(base_url=f"http://{side.name}", model="m", max_model_len=64, ready_s=1.0, info=None)

        yield wait

    def bench(words: Sequence[str]) -> int:
        folder = Path(words[words.index("--run-dir") + 1])
        folder.mkdir()
        found = encode(bench_result())
        found["sides"] = [{"name": words[words.index(flag) + 1]} for flag in ("--plan", "--against")]
        (folder / RESULT_FILE).write_text(json.dumps(found), encoding="utf-8")
        return 0

    monkeypatch.setattr(bench_beside, "measure_if_needed", lambda *_: False)
    monkeypatch.setattr(together, "starting", starting)
    monkeypatch.setattr(bench_beside, "moe_optimizer", bench)
    monkeypatch.setattr(bench_beside, "about", lambda side, _running: {"plan_digest": side.plan.digest})
    out = tmp_path / "record.json"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sides = [
        word
        for side in (f"ours {TINY_MOE}", f"broken {TINY_MOE}", f"stock {TINY_MOE} gpus=1")
        for word in ("--side", side)
    ]
    code = bench_beside.main(["--out", str(out), *sides, "--run-dir", str(tmp_path), "--commit", "none"])
    record = json.loads(out.read_text(encoding="utf-8"))
    assert code == 1
    assert list(record["not_started"]) == ["broken"]
    assert {name: side["gpus"] for name, side in record["sides"].items()} == {"ours": None, "stock": "1"}
    assert started_on == {"ours": None, "broken": None, "stock": "1"}
    assert [[side["name"] for side in each["sides"]] for each in record["benches"]] == [["ours", "stock"]]
