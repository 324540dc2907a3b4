"""Which flags the installed vLLM can know, read from its sources: importing it to ask takes ten seconds."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from moe_optimizer.plan.serve_args import ServeArguments

# Where vLLM defines the arguments of its server: as literals, and as fields of dataclasses.
_SOURCES = ("engine/arg_utils.py", "utils/argparse_utils.py", "entrypoints/**/cli_args.py", "platforms/*.py")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]+")
_LITERAL = re.compile(r"[\"'](--[a-z][a-z0-9-]+)[\"']")
_PLATFORM_PLUGINS = "vllm.platform_plugins"


def unknown_flags(vllm_folder: Path, arguments: ServeArguments) -> tuple[str, ...]:
    """Return those long flags of `arguments` that no word in vLLM's own sources starts with.

    A flag that is returned is certainly refused by vLLM; one that is not may still be. Returns nothing where the
    sources do not say it: they are not where they are expected, or a platform plugin may add flags of its own.
    """
    words = {word.replace("_", "-").lower() for text in _texts(vllm_folder) for word in _WORD.findall(text)}
    if not words or importlib.metadata.entry_points(group=_PLATFORM_PLUGINS):
        return ()
    # argparse takes any beginning of a flag.
    names = {flag: flag.removeprefix("--").lower() for flag in arguments.values if flag.startswith("--")}
    return tuple(flag for flag, name in names.items() if not any(word.startswith(name) for word in words))


def known_flags(vllm_folder: Path) -> tuple[str, ...]:
    """Return the flags that stand as literals in vLLM's sources, sorted: enough to name a near match."""
    return tuple(sorted({flag for text in _texts(vllm_folder) for flag in _LITERAL.findall(text)}))


def _texts(vllm_folder: Path) -> list[str]:
    paths = sorted(path for pattern in _SOURCES for path in vllm_folder.glob(pattern))
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()]
