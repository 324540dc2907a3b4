"""Quantisation methods of vLLM, read from its sources."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_optimizer.inspection.vllm_sources import lacks_quantization


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    folder = tmp_path / "model_executor" / "layers" / "quantization"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text('METHODS = ["fp8", "compressed-tensors"]\n')
    (folder / "inc.py").write_text("if method == 'auto-round':\n    return 'inc'\n")
    return tmp_path


def test_a_method_that_no_source_names_is_lacking(vllm: Path) -> None:
    assert lacks_quantization(vllm, "no_such_method")


@pytest.mark.parametrize("method", ["fp8", "FP8", "compressed_tensors", "auto-round"])
def test_every_form_of_a_method_that_vllm_takes_is_there(vllm: Path, method: str) -> None:
    assert not lacks_quantization(vllm, method)


def test_nothing_is_lacking_where_the_sources_are_not(tmp_path: Path) -> None:
    assert not lacks_quantization(tmp_path, "no_such_method")


@pytest.mark.parametrize(("module", "lacks"), [("vllm.plugins.resolver:register", True), ("theirs:register", False)])
def test_another_packages_plugin_may_register_more(
    vllm: Path, monkeypatch: pytest.MonkeyPatch, module: str, lacks: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [SimpleNamespace(value=module, group=group)])
    assert lacks_quantization(vllm, "no_such_method") is lacks
