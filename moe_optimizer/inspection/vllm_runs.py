"""Reads the table of vLLM versions that this package has been run with: configs/vllm/versions.yaml."""

from __future__ import annotations

from pathlib import Path

from moe_optimizer.plan.json_codec import decode
from moe_optimizer.resources import config_dir
from moe_optimizer.specs.vllm_runs import VllmRuns
from moe_optimizer.yaml_document import read_yaml


def vllm_runs_file() -> Path:
    """Return where the table lies."""
    return config_dir() / "vllm" / "versions.yaml"


def read_vllm_runs(path: Path | None = None) -> VllmRuns:
    """Return the table.

    Args:
        path: the file; None: the shipped one.

    Raises:
        InputError: it cannot be read, or a key is unknown, missing or of the wrong type.
    """
    path = vllm_runs_file() if path is None else path
    return decode(VllmRuns, read_yaml(path, origin=str(path), what="vLLM versions").data, origin=str(path))
