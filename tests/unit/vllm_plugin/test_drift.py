"""Seams: looked for in vLLM's source without importing it."""

from __future__ import annotations

import ast
from pathlib import Path

from moe_optimizer.vllm_plugin import drift
from moe_optimizer.vllm_plugin.drift import SeamStatus, probe_seams

ORACLE = "model_executor/layers/fused_moe/oracle/unquantized.py"


def by_name(root: Path) -> dict[str, drift.Seam]:
    return {seam.name: seam for seam in probe_seams(root)}


def test_everything_is_gone_from_an_empty_folder(tmp_path: Path) -> None:
    assert {seam.status for seam in probe_seams(tmp_path)} == {SeamStatus.GONE}


def test_a_rewritten_function_is_changed_not_present(tmp_path: Path) -> None:
    path = tmp_path / ORACLE
    path.parent.mkdir(parents=True)
    path.write_text("def backend_to_kernel_cls(backend):\n    return []\n")
    seam = by_name(tmp_path)["unquantized kernel choice"]
    assert seam.status is SeamStatus.CHANGED
    assert "0.32" in seam.detail


def test_a_new_abstract_method_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "model_executor/layers/fused_moe/modular_kernel.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "class FusedMoEExperts:\n    @abstractmethod\n    def apply(self): ...\n"
        "class FusedMoEExpertsModular:\n    @abstractmethod\n    def brand_new(self): ...\n"
    )
    seam = by_name(tmp_path)["experts interface"]
    assert seam.status is SeamStatus.CHANGED
    assert "brand_new" in seam.detail


def test_a_source_that_does_not_parse_is_a_change(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "__init__.py").write_text("def (:\n")
    assert by_name(tmp_path)["general plugins"].status is SeamStatus.CHANGED


def test_the_methods_called_provided_are_the_ones_our_classes_have() -> None:
    shared = methods("experts/base.py")
    for device in ("cpu", "cuda"):
        assert shared | methods(f"experts/{device}.py") >= drift.PROVIDED_METHODS, device


def methods(file: str) -> set[str]:
    path = Path(drift.__file__).parent / file
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    return {node.name for node in classes[0].body if isinstance(node, ast.FunctionDef)}
