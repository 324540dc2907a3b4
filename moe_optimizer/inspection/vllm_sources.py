"""Reads from vLLM's sources which flags and quantisation methods it can know: asking it takes ten seconds."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from pathlib import Path

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.near_match import did_you_mean
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.specs.model import ModelSpec
from moe_optimizer.specs.software import VllmInstallation

# Where vLLM defines the arguments of its server: as literals, and as fields of dataclasses.
_FLAG_SOURCES = ("engine/arg_utils.py", "utils/argparse_utils.py", "entrypoints/**/cli_args.py", "platforms/*.py")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]+")
_FLAG = re.compile(r"[\"'](--[a-z][a-z0-9-]+)[\"']")
_PLATFORM_PLUGINS = "vllm.platform_plugins"
# Where vLLM lists its quantisation methods, and where it turns the names in checkpoints into them.
_METHOD_SOURCES = ("model_executor/layers/quantization/**/*.py", "config/*.py", "transformers_utils/**/*.py")
_METHOD = re.compile(r"[\"']([A-Za-z][A-Za-z0-9_/.-]*)[\"']")
_GENERAL_PLUGINS = "vllm.general_plugins"
_KNOWN_PLUGINS = ("vllm.", "moe_optimizer.")
"""Modules whose plugins register no quantisation: vLLM's own, and ours."""


def check_knows(vllm: VllmInstallation, arguments: ServeArguments, model: ModelSpec | None = None) -> None:
    """Refuse a flag or the model's quantisation that vLLM does not have. vLLM would refuse it ten seconds later.

    Raises:
        InputError: names the flag, and the nearest one as hint.
        UnsupportedError: names the quantisation.
    """
    folder = Path(vllm.location)
    method = None if model is None or "--quantization" in arguments else model.quant_method
    if model is not None and method is not None and lacks_quantization(folder, method):
        raise UnsupportedError(
            f"model {model.name}: quant_method: got {method!r:.80}, expected a quantisation that vLLM "
            f"{vllm.version} has"
        )
    for flag in unknown_flags(folder, arguments):
        given = next(each.words[0] for each in arguments.arguments if each.flag == flag)
        raise InputError(
            f"vllm arguments: {given}: vLLM {vllm.version} has no such flag",
            hint=did_you_mean(flag, known_flags(folder)),
        )


def unknown_flags(vllm_folder: Path, arguments: ServeArguments) -> tuple[str, ...]:
    """Return those long flags of `arguments` that no word in vLLM's own sources starts with.

    A flag that is returned is certainly refused by vLLM; one that is not may still be. Returns nothing where the
    sources do not say it: they are not where they are expected, or a platform plugin may add flags of its own.
    """
    words = _plain_words(vllm_folder, _FLAG_SOURCES, _WORD)
    if not words or importlib.metadata.entry_points(group=_PLATFORM_PLUGINS):
        return ()
    # argparse takes any beginning of a flag.
    names = {flag: flag.removeprefix("--").lower() for flag in arguments.values if flag.startswith("--")}
    return tuple(flag for flag, name in names.items() if not any(word.startswith(name) for word in words))


def known_flags(vllm_folder: Path) -> tuple[str, ...]:
    """Return the flags that stand as literals in vLLM's sources, sorted: enough to name a near match."""
    return tuple(sorted(_found(vllm_folder, _FLAG_SOURCES, _FLAG)))


def lacks_quantization(vllm_folder: Path, method: str) -> bool:
    """Return whether no word in vLLM's own sources is `method`, so that vLLM certainly refuses it.

    False where the sources do not say it: they are not where they are expected, or another plugin may register more.
    """
    plugins = importlib.metadata.entry_points(group=_GENERAL_PLUGINS)
    words = _plain_words(vllm_folder, _METHOD_SOURCES, _METHOD)
    others = [entry for entry in plugins if not entry.value.startswith(_KNOWN_PLUGINS)]
    return bool(words) and not others and _plain(method) not in words


@functools.cache
def _plain_words(vllm_folder: Path, sources: tuple[str, ...], pattern: re.Pattern[str]) -> frozenset[str]:
    """Return the words of the sources, which are read once: they stay what they are while a command runs."""
    return frozenset(_plain(word) for word in _found(vllm_folder, sources, pattern))


def _found(vllm_folder: Path, sources: tuple[str, ...], pattern: re.Pattern[str]) -> set[str]:
    paths = [path for source in sources for path in vllm_folder.glob(source) if path.is_file()]
    return {word for path in paths for word in pattern.findall(path.read_text(encoding="utf-8", errors="replace"))}


def _plain(word: str) -> str:
    return word.lower().replace("_", "-")
