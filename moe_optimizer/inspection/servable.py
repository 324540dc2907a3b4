"""Reads from the sources of vLLM and transformers what they have classes for, without importing them.

vLLM reads config.json through a class: one of its own, or one of transformers. Where neither has the model_type and the
file names a class in `auto_map`, it refuses to start without --trust-remote-code, even if its registry has the model.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moe_optimizer.files import text_or_nothing
from moe_optimizer.inspection.vllm_installation import package_folder
from moe_optimizer.inspection.vllm_sources import lacks_quantization

NOT_SERVED = ("_SPECULATIVE_DECODING_MODELS", "_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS")
"""Tables of the registry that are not architectures to serve: drafts, former ones, ones in separate plugins."""

_PAIR = re.compile(r'(?:"([\w.-]+)"\s*[:,]|\b(\w+)\s*=)\s*"\w+Config"')
"""`("gpt2", "GPT2Config")`, `"gpt2": "GPT2Config"` and `gpt2="GPT2Config"`: every form that the tables have."""
_BY_ARCHITECTURE = re.compile(r"^_ARCHITECTURE_TO_MODEL_TYPE\b[^{]*\{([^}]*)\}", re.MULTILINE)
"""vLLM's table for files without a model_type."""


@dataclass(frozen=True, slots=True)
class Registry:
    """The architectures that the installed vLLM knows."""

    served: frozenset[str]
    removed: dict[str, str]
    """Architectures that an earlier version served, and the last version that did."""


@cache
def vllm_registry() -> Registry | None:
    """Return the installed vLLM's registry; None where there is none, or it does not have the expected form."""
    folder = package_folder("vllm")
    return None if folder is None else parse_registry(folder / "model_executor" / "models" / "registry.py")


def parse_registry(path: Path) -> Registry | None:
    """Return the architectures in a vLLM registry's source, or None when it does not have the expected form."""
    try:
        tree = ast.parse(text_or_nothing(path))
    except SyntaxError:
        return None
    served: set[str] = set()
    removed: dict[str, str] = {}
    for statement in tree.body:
        name, value = _assignment(statement)
        if not isinstance(value, ast.Dict) or not name.startswith("_") or not name.isupper():
            continue
        keys = [key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
        if name.endswith("_MODELS") and name not in NOT_SERVED:
            served.update(keys)
        elif name == "_PREVIOUSLY_SUPPORTED_MODELS":
            values = [item.value if isinstance(item, ast.Constant) else "" for item in value.values]
            removed.update({key: str(version) for key, version in zip(keys, values, strict=False)})
    return Registry(frozenset(served), removed) if served else None


def is_servable(architectures: tuple[str, ...]) -> tuple[bool | None, str]:
    """Return whether vLLM serves the first known of `architectures`, None where that is not known, and why."""
    if not architectures:
        return None, "config.json names no architecture"
    registry = vllm_registry()
    if registry is None:
        return None, "there is no installed vLLM whose registry can be read"
    for name in architectures:
        if name in registry.served:
            return True, f"{name} is in the registry of the installed vLLM"
    first = architectures[0]
    if first in registry.removed:
        return False, f"{first} was last served by vLLM {registry.removed[first]}, the installed vLLM has it no more"
    return False, f"{first} is not in the registry of the installed vLLM"


def runs_through_transformers(architecture: str, model_type: str) -> tuple[bool, str]:
    """Return whether vLLM's Transformers backend runs an architecture that its registry does not have.

    It does so for a class of the installed transformers that calls attention through the library's interface;
    the source is read, not imported. Layers that are not attention are beyond the backend, which is not seen here.
    """
    folder, vllm = package_folder("transformers"), package_folder("vllm")
    name = model_type.replace("-", "_")
    if folder is None or vllm is None or not name.isidentifier():
        return False, ""
    source = text_or_nothing(folder / "models" / name / f"modeling_{name}.py")
    if f"\nclass {architecture}(" not in source or "_supports_attention_backend = True" not in source:
        return False, ""
    return True, f"{architecture} is not in vLLM's registry; its Transformers backend runs it"


def with_quantization(servable: tuple[bool | None, str], method: str | None) -> tuple[bool | None, str]:
    """Return the answer for a checkpoint whose architecture has this one, as its weights are quantised."""
    folder = package_folder("vllm")
    if servable[0] and folder is not None and method is not None and lacks_quantization(folder, method):
        return False, f"quant_method {method!r:.80} is not a quantisation of the installed vLLM"
    return servable


def _assignment(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id, statement.value
    return "", None


@dataclass(frozen=True, slots=True)
class ConfigurationClasses:
    """What the installed packages can read by themselves."""

    model_types: frozenset[str]
    architectures: frozenset[str]
    """Architectures that need no model_type."""

    def has(self, model_type: str, architectures: tuple[str, ...]) -> bool:
        """Whether one of the classes reads such a configuration."""
        if model_type:
            return model_type in self.model_types
        return bool(architectures) and architectures[0] in self.architectures


@cache
def configuration_classes() -> ConfigurationClasses | None:
    """Return the classes of the installed vLLM and transformers; None unless both are here and of the known form."""
    vllm, transformers = package_folder("vllm"), package_folder("transformers")
    if vllm is None or transformers is None:
        return None
    own = text_or_nothing(vllm / "transformers_utils" / "config.py")
    auto = transformers / "models" / "auto"
    # The table moved to the first file in transformers 5.
    shared = text_or_nothing(auto / "auto_mappings.py") + text_or_nothing(auto / "configuration_auto.py")
    return parse_configuration_classes(own, shared)


def parse_configuration_classes(vllm: str, transformers: str) -> ConfigurationClasses | None:
    """Return the classes that the sources of both packages list, or None when one of them lists none."""
    tables = [{quoted or plain for quoted, plain in _PAIR.findall(text)} for text in (vllm, transformers)]
    if not all(tables):
        return None
    named = _BY_ARCHITECTURE.search(vllm)
    return ConfigurationClasses(
        model_types=frozenset().union(*tables),
        architectures=frozenset(re.findall(r'"(\w+)"\s*:', named[1]) if named else ()),
    )
