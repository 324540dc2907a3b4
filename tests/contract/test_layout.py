"""The layout rules that the import contracts cannot express."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "moe_optimizer"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_no_source_file_exceeds_600_lines() -> None:
    sizes = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: size for name, size in sizes.items() if size > 600} == {}


def test_the_embedded_engine_stays_small_enough_to_be_read() -> None:
    lines = [line for path in (PACKAGE / "engine").rglob("*.py") for line in path.read_text("utf-8").splitlines()]
    assert sum(bool(line.strip()) for line in lines) <= 3500


def test_every_file_of_the_embedded_engine_has_a_place_in_the_reading_order() -> None:
    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    order = page.partition("## Reading order")[2].partition("\n## ")[0]
    named = set(re.findall(r"`moe_optimizer/engine/([a-z_]+(?:\.py|/))[^`]*`", order))
    there = {f"{path.name}/" if path.is_dir() else path.name for path in (PACKAGE / "engine").glob("[a-z]*")}
    assert named == there


def test_only_the_plugin_measure_and_one_attention_backend_name_vllm_in_an_import() -> None:
    offenders = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if not {"vllm_plugin", "measure", "vllm_flash_attention.py"} & set(path.parts)
        and any(name.split(".")[0] == "vllm" for name in _imports(path))
    ]
    assert offenders == []


def test_autoload_imports_only_the_standard_library_at_module_level() -> None:
    tree = ast.parse((PACKAGE / "autoload.py").read_text(encoding="utf-8"))
    names = {name.split(".")[0] for node in tree.body for name in _imported_by(node)}
    assert names <= set(sys.stdlib_module_names) | {"__future__"}


def test_no_test_file_imports_transformers_at_its_top() -> None:
    """Each of the test workers imports every file, and transformers takes 6 s of processor time."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    assert tests
    at_the_top = re.compile(r"^(import|from) transformers\b", re.MULTILINE)
    assert [str(path.relative_to(ROOT)) for path in tests if at_the_top.search(path.read_text("utf-8"))] == []


def test_device_headers_include_no_torch() -> None:
    headers = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cuh", ".cu", ".cpp", ".hpp"}]
    assert headers
    offenders = [path.name for path in headers if re.search(r"#include\s*[<\"](torch|ATen|c10)/", path.read_text())]
    assert offenders == []


@pytest.mark.parametrize(
    "statement",
    [
        "import moe_optimizer",
        "import moe_optimizer.planner",
        "import moe_optimizer.cli.main",
        # Imports the module of every command.
        "from moe_optimizer.cli.main import main; main(['--help'])",
    ],
)
def test_importing_loads_no_heavy_package(statement: str) -> None:
    heavy = {"torch", "vllm", "triton", "transformers", "numpy"}
    code = f"{statement}; import sys; print(sorted({{name.split('.')[0] for name in sys.modules}} & {heavy}))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert shown.splitlines()[-1] == "[]"


def _imports(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [name for node in ast.walk(tree) for name in _imported_by(node)]


def _imported_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []
