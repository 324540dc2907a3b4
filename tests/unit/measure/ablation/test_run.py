"""The rungs of the ablation: the same tokens from each, and an error from one that gives others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.measure.ablation import run
from moe_optimizer.measure.ablation.climb import ClimbRequest, climb
from moe_optimizer.measure.ablation.rungs import OPTIMIZATIONS, AblationSettings
from moe_optimizer.measure.process import MeasurementError
from moe_optimizer.plan.json_codec import decode, encode
from tests.needed import skip_without

skip_without("transformers")

TINY_MOE = str(Path(__file__).resolve().parents[4] / "examples" / "tiny-moe")
SETTINGS = AblationSettings(
    model=TINY_MOE, on_gpu=False, dtype="float32", num_requests=10, naive_requests=2, input_len=(3, 9),
    output_len=(2, 5), shared=20, turns=1,
)  # fmt: skip
ON_CPU = [place for place, each in enumerate(OPTIMIZATIONS) if not each.needs_gpu]


def here(_module: str, request: Any, **_: Any) -> Any:
    """The process of a rung, in this one: the request and the result go through JSON as they do there."""
    return encode(climb(decode(ClimbRequest, encode(request), origin="request"), lambda _share, _text: None))


@pytest.mark.thorough
def test_every_rung_gives_the_tokens_of_the_naive_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def watched(module: str, request: Any, **named: Any) -> Any:
        found = here(module, request, **named)
        asked.append({"rung": request["rung"], "outputs": found["outputs"], "log": named["log"]})
        return found

    monkeypatch.setattr(run, "run_measurement", watched)
    result = run.run_ablation(SETTINGS, log_folder=tmp_path, on_step=lambda _share, _text: None)
    assert [each["rung"] for each in asked] == ON_CPU
    assert len({each["log"] for each in asked}) == len(ON_CPU)
    assert [len(each["outputs"]) for each in asked] == [2, 2, *[10] * (len(ON_CPU) - 2)]
    assert [rung.equal for rung in result.rungs if rung.name != "fp8"] == [1.0] * (len(ON_CPU) - 1)
    assert all(rung.tokens_per_s == pytest.approx(rung.tokens / rung.seconds[0]) for rung in result.rungs)
    assert result.left_out == tuple(each.name for each in OPTIMIZATIONS if each.needs_gpu)
    table = run.render(result).splitlines()
    assert [line.startswith(each.name) for line, each in zip(table[1:], OPTIMIZATIONS, strict=False)][:8] == [True] * 8
    assert sum("needs a GPU" in line for line in table) == len(result.left_out)


@pytest.mark.parametrize(
    ("rung", "on_gpu", "refused"),
    # A GPU's products of another batch size sum in another order.
    [("prefix_caching", False, True), ("fused_moe", False, False), ("static batches", True, False)],
)
def test_other_tokens_are_an_error_unless_rounding_may_have_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rung: str, on_gpu: bool, refused: bool
) -> None:
    def pretended(_module: str, request: Any, **_: Any) -> Any:
        token = int(OPTIMIZATIONS[request["rung"]].name == rung)
        return {"tokens": 2, "seconds": [0.5], "peak_bytes": 1, "outputs": [[7, token]]}

    monkeypatch.setattr(run, "run_measurement", pretended)

    def climbed() -> Any:
        settings = dataclasses.replace(SETTINGS, on_gpu=on_gpu)
        return run.run_ablation(settings, log_folder=tmp_path, on_step=lambda _share, _text: None)

    if refused:
        with pytest.raises(MeasurementError, match=rf"{rung}: 50\.0%"):
            climbed()
    else:
        assert {each.name: each.equal for each in climbed().rungs}[rung] == 0.5


def test_a_climb_that_was_cut_off_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[int] = []

    def pretended(_module: str, request: Any, **named: Any) -> Any:
        if len(started) == 3 and named["timeout_s"]:
            raise MeasurementError(f"not done after {named['timeout_s']:.0f} s")
        started.append(request["rung"])
        return {"tokens": 2, "seconds": [0.5], "peak_bytes": 1, "outputs": [[7, 8]]}

    monkeypatch.setattr(run, "run_measurement", pretended)
    climb, seen = run.Climb(), list[int]()
    more: dict[str, Any] = {"log_folder": tmp_path, "on_step": lambda _share, _text: None, "climb": climb}
    with pytest.raises(MeasurementError, match="after 100 s"):
        run.run_ablation(SETTINGS, **more, on_rung=lambda: seen.append(len(climb.rungs)), limit_s=100)
    assert seen == [1, 2, 3]
    assert climb.outputs == [[7, 8]]
    result = run.run_ablation(SETTINGS, **more)
    assert started == ON_CPU
    assert [rung.name for rung in result.rungs] == [OPTIMIZATIONS[place].name for place in ON_CPU]
