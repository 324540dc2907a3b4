from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.specs.model import ModelSpec

CONFIGS = Path(__file__).parents[2] / "data" / "model_configs"


@pytest.fixture(scope="session")
def load_config() -> Callable[[str], dict[str, Any]]:
    """Returns the configuration tests/data/model_configs/<name>.json as a fresh object."""

    def load(name: str) -> dict[str, Any]:
        return json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))

    return load


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model folder: config.json from an object or raw text, and further files."""

    def write(config: Mapping[str, Any] | str | bytes, files: Mapping[str, Any] | None = None) -> Path:
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        data = config if isinstance(config, (str, bytes)) else json.dumps(config)
        (folder / "config.json").write_bytes(data if isinstance(data, bytes) else data.encode())
        for name, content in (files or {}).items():
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            (folder / name).write_bytes(body)
        return folder

    return write


@pytest.fixture
def inspect_config(model_folder: Callable[..., Path]) -> Callable[..., ModelSpec]:
    """Inspects a folder that holds the given configuration (and further files)."""

    def inspect(config: Mapping[str, Any] | str | bytes, files: Mapping[str, Any] | None = None) -> ModelSpec:
        return ModelInspector().inspect(model_folder(config, files))

    return inspect
