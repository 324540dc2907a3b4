"""Finds and reads tuned Triton configurations."""

from __future__ import annotations

from collections.abc import Mapping
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


def state_path(config: Path) -> Path:
    """Return where a tuning keeps what it measured for the configuration file `config`."""
    return config.with_name(config.name.removesuffix(".json") + STATE_ENDING)


def nearest(rows: Mapping[int, Row], tokens: int) -> Row:
    """Return the row that vLLM takes for a number of tokens: of the nearest key, the first in the file on a tie."""
    return rows[min(rows, key=lambda key: abs(key - tokens))]
