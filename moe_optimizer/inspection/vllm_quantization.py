"""Whether the installed vLLM can know a quantisation method, read from its sources: asking it takes ten seconds."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

# Where vLLM lists its methods, and where it turns the names in checkpoints into them.
_SOURCES = ("model_executor/layers/quantization/**/*.py", "config/*.py", "transformers_utils/**/*.py")
_LITERAL = re.compile(r"[\"']([A-Za-z][A-Za-z0-9_/.-]*)[\"']")
_PLUGINS = "vllm.general_plugins"
_KNOWN = ("vllm.", "moe_optimizer.")
"""Modules whose plugins register no quantisation: vLLM's own, and ours."""


def lacks_quantization(vllm_folder: Path, method: str) -> bool:
    """Return whether no word in vLLM's own sources is `method`, so that vLLM certainly refuses it.

    False where the sources do not say it: they are not where they are expected, or another plugin may register more.
    """
    others = [entry for entry in importlib.metadata.entry_points(group=_PLUGINS) if not entry.value.startswith(_KNOWN)]
    texts = [
        path.read_text(encoding="utf-8", errors="replace")
        for pattern in _SOURCES
        for path in sorted(vllm_folder.glob(pattern))
        if path.is_file()
    ]
    words = {_plain(word) for text in texts for word in _LITERAL.findall(text)}
    return bool(words) and not others and _plain(method) not in words


def _plain(word: str) -> str:
    return word.lower().replace("_", "-")
