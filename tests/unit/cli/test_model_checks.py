"""A model's files are whole, or the doctor says which one is not."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from moe_optimizer.cli.check import Check
from moe_optimizer.cli.model_checks import model_checks

TINY_MOE = Path(__file__).resolve().parents[3] / "examples" / "tiny-moe"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_MOE, tmp_path / "model"))


def checks(model: Path) -> dict[str, Check]:
    return {check.name: check for check in model_checks(str(model))}


def split(model: Path) -> None:
    """Divide the weights into two files with an index, as large models are published."""
    raw = (model / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    names = sorted(header, key=lambda name: header[name]["data_offsets"][0])
    weight_map: dict[str, str] = {}
    for part, chosen in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-0000{part}-of-00002.safetensors"
        first = header[chosen[0]]["data_offsets"][0]
        last = header[chosen[-1]]["data_offsets"][1]
        entries = {
            name: header[name] | {"data_offsets": [offset - first for offset in header[name]["data_offsets"]]}
            for name in chosen
        }
        text = json.dumps(entries).encode()
        (model / file).write_bytes(struct.pack("<Q", len(text)) + text + data[first:last])
        weight_map |= dict.fromkeys(chosen, file)
    (model / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    (model / "model.safetensors").unlink()


def test_a_whole_model_is_whole(model: Path) -> None:
    assert {check.status for check in checks(model).values()} == {"ok"}


def test_a_whole_model_in_two_files_is_whole(model: Path) -> None:
    split(model)
    weights = checks(model)["weights"]
    assert (weights.status, "2 files" in weights.detail) == ("ok", True)


@pytest.mark.parametrize("lost", [1, 100, 7_000_000])
def test_a_file_that_was_cut_off_is_named(model: Path, lost: int) -> None:
    path = model / "model.safetensors"
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - lost)
    weights = checks(model).get("weights", checks(model)["model"])
    assert weights.status == "missing"
    assert "model.safetensors" in weights.detail


def test_a_file_with_more_than_its_header_says_is_named(model: Path) -> None:
    with (model / "model.safetensors").open("ab") as stream:
        stream.write(b"more")
    found = checks(model)["model"]
    assert (found.status, "model.safetensors" in found.detail) == ("missing", True)


@pytest.mark.parametrize("content", [b"", b"garbage that is no header", None], ids=["empty", "garbage", "more"])
def test_a_file_beside_the_weights_that_is_not_whole_is_named(model: Path, content: bytes | None) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "consolidated.safetensors").write_bytes(data + b"more" if content is None else content)
    weights = checks(model)["weights"]
    assert (weights.status, "consolidated.safetensors" in weights.detail) == ("missing", True)


def test_one_file_of_several_without_an_index_is_named(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00003.safetensors")
    weights = checks(model)["weights"]
    assert (weights.status, "model-00001-of-00003.safetensors" in weights.detail) == ("missing", True)


def test_an_absent_shard_is_named(model: Path) -> None:
    split(model)
    (model / "model-00002-of-00002.safetensors").unlink()
    weights = checks(model)["weights"]
    assert weights.status == "missing"
    assert "model-00002-of-00002.safetensors" in weights.detail


@pytest.mark.parametrize("lost", [True, False])
def test_an_index_that_disagrees_with_the_files_is_named(model: Path, lost: bool) -> None:
    split(model)
    index = json.loads((model / INDEX).read_text(encoding="utf-8"))
    if lost:
        del index["weight_map"]["model.norm.weight"]
    else:
        index["weight_map"]["model.invented.weight"] = "model-00001-of-00002.safetensors"
    (model / INDEX).write_text(json.dumps(index), encoding="utf-8")
    weights = checks(model)["weights"]
    assert (weights.status, weights.detail.startswith(INDEX)) == ("missing", True)


def test_absent_weights_are_missing(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert checks(model)["weights"].status == "missing"


def test_a_broken_tokenizer_is_named(model: Path) -> None:
    (model / "tokenizer.json").write_text("{", encoding="utf-8")
    tokenizer = checks(model)["tokenizer"]
    assert (tokenizer.status, "tokenizer.json" in tokenizer.detail) == ("missing", True)


def test_an_absent_tokenizer_is_missing(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert checks(model)["tokenizer"].status == "missing"


def test_an_absent_chat_template_is_a_note(model: Path) -> None:
    (model / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    assert checks(model)["chat template"].status == "note"


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    found = checks(tmp_path / "nowhere")
    assert list(found) == ["model"]
    assert found["model"].status == "missing"
