"""Computes the longest sequence that vLLM accepts: the length a configuration states, times its RoPE scaling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from moe_optimizer.inspection.config import Config

_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""The fields that vLLM reads; the smallest counts."""
_ALREADY_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of RoPE scaling whose stated length includes the factor."""


def longest_sequence(config: Config, model_type: str, max_position: int) -> int:
    """Return vLLM's limit in tokens; 0 where the configuration states no length.

    Args:
        config: the language model's object.
        model_type: of that object.
        max_position: the length read from any field, used where none of vLLM's is there.

    Raises:
        InputError: a length is not an integer, or the scaling is no object with a number.
    """
    stated = [length for name in _LENGTHS if (length := config.integer(name, 0))]
    length = config.integer("model_max_length", 0) or min(stated, default=max_position)
    # Gemma 3 states the scaled length beside a factor.
    return length if "gemma3" in model_type else int(length * _factor(config))


def _factor(config: Config) -> float:
    factor: float = 1.0
    for name, rope in _rope_parameters(config):
        kind = rope.get("rope_type") or rope.get("type") or "default"
        value = rope.get("factor")
        if isinstance(value, (str, list, dict)):
            raise config.error(f"{name}.factor", value, "a number")
        if kind in _ALREADY_SCALED or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        factor = value if 0 < value < math.inf else factor
    return factor


def _rope_parameters(config: Config) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the parameters of each kind of layer, and the field they are in; most models have one kind."""
    for name in ("rope_scaling", "rope_parameters"):
        entry = config.get(name)
        if isinstance(entry, (str, list)):
            raise config.error(name, entry, "an object")
        if isinstance(entry, Mapping) and entry:
            nested = [value for value in entry.values() if isinstance(value, Mapping)]
            yield from ((name, each) for each in (nested if len(nested) == len(entry) else [entry]))
            return
