"""Tells whether vLLM can read a model's configuration without code of the model's own.

vLLM reads config.json through a class: one of its own, or one of transformers. Where neither has the model_type and the
file names a class in `auto_map`, it refuses to start without --trust-remote-code, even if its registry has the model.
Both tables are read from the sources, not imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moe_optimizer.inspection.vllm_installation import package_folder

_PAIR = re.compile(r'(?:"([\w.-]+)"\s*[:,]|\b(\w+)\s*=)\s*"\w+Config"')
"""`("gpt2", "GPT2Config")`, `"gpt2": "GPT2Config"` and `gpt2="GPT2Config"`: every form that the tables have."""
_BY_ARCHITECTURE = re.compile(r"^_ARCHITECTURE_TO_MODEL_TYPE\b[^{]*\{([^}]*)\}", re.MULTILINE)
"""vLLM's table for files without a model_type."""


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
    own = _text(vllm / "transformers_utils" / "config.py")
    auto = transformers / "models" / "auto"
    # The table moved to the first file in transformers 5.
    shared = _text(auto / "auto_mappings.py") + _text(auto / "configuration_auto.py")
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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
