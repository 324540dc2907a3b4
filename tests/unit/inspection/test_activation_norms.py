"""The header of a file of activation norms: read without its data, refused when it is something else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.activation_norms import read_activation_norms_file

METADATA = {"model": "tiny-moe", "tokens": "64"}


def written(folder: Path, header: Any) -> str:
    text = json.dumps(header).encode()
    path = folder / "norms.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return str(path)


def header(*names: str, metadata: Any = METADATA) -> dict[str, Any]:
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return {"__metadata__": metadata, **dict.fromkeys(names, tensor)}


def test_model_tokens_and_layers_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, header("layers.10.x", "layers.10.h", "layers.2.h", "layers.2.x"))
    found = read_activation_norms_file(path)
    assert found is not None
    assert (found.path, found.model, found.tokens, found.layers) == (path, "tiny-moe", 64, (2, 10))


def test_no_file_is_none() -> None:
    assert read_activation_norms_file(None) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header("layers.1.x"), r"layers\.N\.x and layers\.N\.h"),
        (header(), "of every layer"),
        (header("layers.1.x", "layers.1.h", "weight"), "of every layer"),
        (header("layers.1.x", "layers.1.h", metadata={"model": "m"}), "model and tokens"),
        (header("layers.1.x", "layers.1.h", metadata=None), "model and tokens"),
        ([], "header .*object"),
    ],
)
def test_something_else_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_activation_norms_file(written(tmp_path, content))


@pytest.mark.parametrize(("content", "words"), [(b"", "safetensors file"), (b"\xff" * 16, "a header of")])
def test_bytes_that_are_no_header_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "norms.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_activation_norms_file(str(path))


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.safetensors: .*No such"):
        read_activation_norms_file(str(tmp_path / "absent.safetensors"))


def test_a_pipe_or_a_device_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(InputError, match=f"^passes.sparsity_24.activation_norms: {path}:.*regular file"):
            read_activation_norms_file(str(path))
