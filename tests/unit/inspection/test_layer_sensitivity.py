from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.layer_sensitivity import read_sensitivity_file
from moe_optimizer.specs.layer_sensitivity import LayerSensitivity

MEASURED = LayerSensitivity(model="m", weights="mxfp4", tokens=100, errors={0: 0.021, 10: 0.5, 2: 0.0})


def written(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(json.loads(MEASURED.to_json()) | changes))
    return path


def test_no_file_is_no_measurement() -> None:
    assert read_sensitivity_file(None, "four_bit") is None


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = str(written(tmp_path / "s.json"))
    found = read_sensitivity_file(path, "four_bit")
    assert found is not None
    assert (found.path, found.measured) == (path, MEASURED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 1}, "schema_version: got 1, expected 2"),
        ({"model": 3}, "model: got int 3"),
        ({"weights": "fp8_tensor"}, "weights: got str"),
        ({"tokens": 0}, "tokens: got 0,"),
        ({"tokens": "many"}, "tokens: got str"),
        ({"errors": {}}, "errors: got no"),
        ({"errors": [1]}, "errors: got list"),
        ({"errors": {"a": 0.1}}, "errors.a: got str"),
        ({"errors": {"1": -0.1}}, "errors.1: got -0.1"),
        ({"errors": {"1": True}}, "errors.1: got bool"),
        ({"errors": {"1": float("nan")}}, "errors.1: got nan"),
        ({"extra": 1}, "unknown field 'extra'"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_sensitivity_file(str(written(tmp_path / "s.json", **changes)), "four_bit")
    assert message in str(caught.value)
    assert "s.json" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s.json").write_bytes(content)
    with pytest.raises(InputError, match=r"s\.json"):
        read_sensitivity_file(str(tmp_path / "s.json"), "four_bit")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_sensitivity_file(str(tmp_path / "s.json"), "four_bit")


def test_a_pipe_or_a_device_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(InputError, match=f"^passes.four_bit.sensitivity: {path}:.*regular file"):
            read_sensitivity_file(str(path), "four_bit")
