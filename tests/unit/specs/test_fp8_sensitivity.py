from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.specs.fp8_sensitivity import Fp8Sensitivity, read_fp8_sensitivity, read_sensitivity_file

MEASURED = Fp8Sensitivity(model="m", granularity="block", tokens=100, errors={0: 0.021, 10: 0.5, 2: 0.0})


def written(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(json.loads(MEASURED.to_json()) | changes))
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    assert read_fp8_sensitivity(written(tmp_path / "s.json")) == MEASURED


def test_no_file_is_no_measurement(tmp_path: Path) -> None:
    assert read_sensitivity_file(None) is None
    path = str(written(tmp_path / "s.json"))
    found = read_sensitivity_file(path)
    assert found is not None
    assert (found.path, found.measured) == (path, MEASURED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "schema_version: got 2, expected 1"),
        ({"model": 3}, "model: got 3, expected a text"),
        ({"granularity": "tensor"}, "granularity: got 'tensor', expected block or channel"),
        ({"tokens": 0}, "tokens: got 0, expected a whole number of at least 1"),
        ({"tokens": "many"}, "tokens: got 'many'"),
        ({"errors": {}}, "errors: expected an object of layers"),
        ({"errors": [1]}, "errors: expected an object of layers"),
        ({"errors": {"a": 0.1}}, "errors: got layer 'a', expected a number"),
        ({"errors": {"1": -0.1}}, "layer 1: got -0.1, expected a number of at least 0"),
        ({"errors": {"1": True}}, "layer 1: got True"),
        ({"errors": {"1": float("nan")}}, "layer 1: got nan"),
        ({"extra": 1}, "expected an object with the keys errors, granularity, model, schema_version, tokens"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_fp8_sensitivity(written(tmp_path / "s.json", **changes))
    assert message in str(caught.value)
    assert "s.json" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s.json").write_bytes(content)
    with pytest.raises(InputError, match=r"s\.json"):
        read_fp8_sensitivity(tmp_path / "s.json")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_fp8_sensitivity(tmp_path / "s.json")


def test_a_pipe_or_a_device_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(InputError, match=f"^passes.fp8.sensitivity: {path}: is not a regular file"):
            read_sensitivity_file(str(path))
