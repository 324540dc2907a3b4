"""Checks vLLM's version, and reads the source text that patches are compared with."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from moe_optimizer.errors import described

MIN_VERSION = (0, 26)
"""Oldest vLLM whose kernel choice asks classes in order through one module-level function."""


def supported_version(version: str) -> tuple[bool, str]:
    """Return whether patches may be applied to this vLLM, and why not.

    A version that does not parse, as of a source build, is accepted: the fingerprints decide.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return True, ""
    if (int(match[1]), int(match[2])) < MIN_VERSION:
        return False, f"needs vLLM >= {'.'.join(map(str, MIN_VERSION))}, found {version}"
    return True, ""


def vllm_root() -> Path | None:
    """Return the folder of the vLLM that `import vllm` would give, without importing it; None when there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def module_path(root: Path, module: str) -> Path:
    """Return the source file of a vLLM module ("vllm.envs") under the package folder `root`."""
    relative = Path(*module.split(".")[1:])
    package = root / relative / "__init__.py"
    return package if package.is_file() else (root / relative).with_suffix(".py")


@functools.lru_cache(maxsize=32)
def _parsed(path: Path) -> tuple[str, ast.Module]:
    text = path.read_text(encoding="utf-8")
    return text, ast.parse(text)


def definition_source(path: Path, qualname: str) -> str | None:
    """Return the source text of a function, class or assigned name in `path`, dedented; None when it has none.

    Raises:
        OSError: the file cannot be read.
        SyntaxError: it does not parse.
    """
    text, node = _parsed(path)
    for name in qualname.split("."):
        found = next((child for child in ast.iter_child_nodes(node) if name in _defined_names(child)), None)
        if found is None:
            return None
        node = found
    segment = ast.get_source_segment(text, node, padded=True)
    return None if segment is None else textwrap.dedent(segment)


def _defined_names(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def why_changed(relied_on: Mapping[str, Mapping[str, str]]) -> str:
    """Return what differs in the source of this process's vLLM from the versions that are known, or "".

    Args:
        relied_on: "module:name" -> versions -> `fingerprint` of its source; "": it is not there.
    """
    root = vllm_root()
    assert root is not None, "vLLM runs in this process"
    for target, known in relied_on.items():
        module, _, name = target.partition(":")
        try:
            source = definition_source(module_path(root, module), name)
        except (OSError, SyntaxError) as error:
            return f"{module}: source cannot be read ({described(error)})"
        found = "" if source is None else fingerprint(source)
        if found not in known.values():
            return f"vLLM's {name} changed: source {found or 'gone'}, known are {', '.join(known.values())}"
    return ""


def fingerprint(source: str) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of `source`; what `Patch.fingerprints` holds."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]
