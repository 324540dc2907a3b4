"""What a measurement on a text is told is checked before vLLM is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_optimizer.measure import activation_norms, fp8_sensitivity

TINY_MOE = Path(__file__).resolve().parents[3] / "examples" / "tiny-moe"
TOOLS = pytest.mark.parametrize("tool", [fp8_sensitivity, activation_norms])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("def add(a, b):\n", encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("vLLM would be started")

    for tool in (fp8_sensitivity, activation_norms):
        monkeypatch.setattr(tool, "observe_text", started)


@TOOLS
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--max-tokens": "0"}, "--max-tokens: got 0, expected at least 1"),
        ({"--output": "absent/file"}, "no folder"),
        ({"--output": "."}, "got a folder, expected a file"),
        ({"text": "absent.txt"}, "No such file or directory"),
        ({"text": "latin.txt"}, "latin.txt: not UTF-8 text"),
        ({"text": "empty.txt"}, "empty.txt: the text is empty"),
        ({"model": "absent-model/"}, "absent-model"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_measured_ends_with_a_sentence(
    tool, changes, said, text, tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "empty.txt").touch()
    given = {"model": str(TINY_MOE), "text": str(text), "--output": "file", "--max-tokens": "9"} | changes
    flags = [word for flag in ("--output", "--max-tokens") for word in (flag, given[flag])]
    assert tool.main([given["model"], given["text"], *flags]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert said in first
    assert not rest
    assert not (tmp_path / "file").exists()


@TOOLS
def test_a_model_without_experts_is_unsupported(tool, text, tmp_path, capsys: pytest.CaptureFixture[str]):
    config = json.loads((TINY_MOE / "config.json").read_text(encoding="utf-8"))
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [0, 1, 2, 3]}), encoding="utf-8")
    assert tool.main([str(dense), str(text), "--output", str(tmp_path / "file")]) == 3
    assert "the model has no experts" in capsys.readouterr().err


def test_the_folder_at_hand_has_the_name_that_a_plan_gives_it(text, tmp_path, monkeypatch):
    seen = {}

    def measured(model: str, text: str, **settings: object) -> None:
        seen.update(settings)
        raise OSError("enough")

    monkeypatch.setattr(fp8_sensitivity, "measure", measured)
    monkeypatch.chdir(TINY_MOE)
    fp8_sensitivity.main([".", str(text), "--output", str(tmp_path / "file")])
    assert seen["name"] == "tiny-moe"
