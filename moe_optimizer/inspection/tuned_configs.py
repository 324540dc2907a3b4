"""Finds and reads tuned Triton configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.json_file import read_json_object, shown
from moe_optimizer.resources import cache_dir

FOLDER_VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"
"""vLLM's own variable; it looks there before it looks among its own files."""
SHIPPED = "model_executor/layers/fused_moe/configs"
"""Where vLLM keeps its own, from its package's folder."""
REQUIRED = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
"""What every row must say; the kernel launch fails without."""
STATE_ENDING = ".tuning.json"
"""Of the file in which `moe-optimizer tune` keeps what it has measured, beside the configuration."""
_MAX_STATE_BYTES = 32 << 20

Row = dict[str, int]
"""Launch parameters of the kernel for one number of tokens."""


def user_folder(vllm_version: str, environ: Mapping[str, str]) -> Path:
    """Return the folder of the user's own configurations: what vLLM's variable names, else one in the cache.

    The one in the cache is of one vLLM version: another brings another kernel and another Triton.
    """
    named = environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    return cache_dir(environ) / "tuned_configs" / f"vllm-{vllm_version or 'unknown'}"


def read_rows(path: Path) -> dict[int, Row]:
    """Return a configuration: number of tokens -> launch parameters.

    Raises:
        InputError: not a regular readable JSON file, or not a configuration; vLLM would end on it.
    """
    rows: dict[int, Row] = {}
    for key, entry in read_json_object(path).items():
        if key == "triton_version":
            continue
        if not key.isdecimal() or not isinstance(entry, dict):
            raise InputError(f"{path.name}: {key!r:.40}: got {shown(entry)}, expected a number of tokens with a row")
        missing = [name for name in REQUIRED if name not in entry]
        wrong = [name for name, value in entry.items() if isinstance(value, bool) or not isinstance(value, int)]
        if missing or wrong:
            name = (missing or wrong)[0]
            got = shown(entry[name]) if name in entry else "nothing"
            raise InputError(f"{path.name}: {key}.{name}: got {got}, expected an integer")
        rows[int(key)] = {name: int(str(value)) for name, value in entry.items()}
    if not rows:
        raise InputError(f"{path.name}: has no row")
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSize:
    """A number of tokens at which a tuning found a row that beats what vLLM takes without the file."""

    tokens: int
    ratio: float
    """Time without over time with the row, of one MoE layer, timed in turns."""
    vllm_version: str
    """With which it was measured."""


def state_path(config: Path) -> Path:
    """Return where a tuning keeps what it measured for the configuration file `config`."""
    return config.with_name(config.name.removesuffix(".json") + STATE_ENDING)


def read_tuned_sizes(config: Path) -> tuple[TunedSize, ...]:
    """Return what the tuning that made a configuration measured, smallest first; () where no tuning made it.

    Raises:
        InputError: what it left beside the configuration cannot be read.
    """
    path = state_path(config)
    if not path.exists():
        return ()
    state = read_json_object(path, max_bytes=_MAX_STATE_BYTES)
    sizes = []
    try:
        version = str(state["identity"]["vllm"])  # type: ignore[index]
        for verdict in state["verdicts"].values():  # type: ignore[union-attr]
            tokens, ratio, low, high = (verdict[name] for name in ("tokens", "ratio", "low", "high"))
            if not (math.isfinite(ratio) and ratio > 0 and tokens >= 1):
                raise ValueError(f"{tokens} tokens, ratio {ratio}")
            if low <= high:
                sizes.append(TunedSize(tokens=int(tokens), ratio=float(ratio), vllm_version=version))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path.name}: not a tuning: {type(error).__name__}: {error}") from None
    return tuple(sorted(sizes, key=lambda size: size.tokens))


def nearest(rows: Mapping[int, Row], tokens: int) -> Row:
    """Return the row that vLLM takes for a number of tokens: of the nearest key, the first in the file on a tie."""
    return rows[min(rows, key=lambda key: abs(key - tokens))]
