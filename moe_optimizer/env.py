"""Reads the environment variables of this package.

An unknown `MOE_OPTIMIZER_*` variable is an error: otherwise a misspelt one would be ignored silently.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.near_match import did_you_mean

PROFILE = "MOE_OPTIMIZER_PROFILE"
"""Plan with this profile inside a plain `vllm serve`."""
PLAN = "MOE_OPTIMIZER_PLAN"
"""Apply this plan.json inside a vLLM process; the launcher sets it."""
RUN_DIR = "MOE_OPTIMIZER_RUN_DIR"
"""Folder for plans, proofs and server logs."""
DISABLE = "MOE_OPTIMIZER_DISABLE"
"""1: the plugin changes nothing, whatever else is set."""
HARDWARE = "MOE_OPTIMIZER_HARDWARE"
"""Plan for this entry of configs/hardware instead of this machine."""
CALIBRATE = "MOE_OPTIMIZER_CALIBRATE"
"""Time limit in seconds for measuring kernels in `serve`, if no table of kernel speeds fits; 0: never."""
LAUNCHER = "MOE_OPTIMIZER_LAUNCHER"
"""Process with which this one ends, by id and start time; the launcher sets it."""
RESTARTS = "MOE_OPTIMIZER_RESTARTS"
"""How often the launcher has started this server again after an unexpected end; the launcher sets it."""
EXPERT_SERIES = "MOE_OPTIMIZER_EXPERT_SERIES"
"""1: /metrics has the tokens of each expert, thousands of series; without it figures for each layer."""

NAMES = (PROFILE, PLAN, RUN_DIR, DISABLE, HARDWARE, CALIBRATE, LAUNCHER, RESTARTS, EXPERT_SERIES)
_PREFIX = "MOE_OPTIMIZER_"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Settings from environment variables; None for a variable that is not set."""

    profile: str | None
    plan: Path | None
    run_dir: Path | None
    disabled: bool
    hardware: str | None
    calibrate_s: float | None
    expert_series: bool


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Return the package's settings from `environ` (default: this process's).

    Raises:
        InputError: an unknown MOE_OPTIMIZER_* variable, or a value of the wrong type.
    """
    environ = os.environ if environ is None else environ
    for name in environ:
        if name.startswith(_PREFIX) and name not in NAMES:
            raise InputError(
                f"environment: unknown variable {name}, expected one of {', '.join(NAMES)}",
                hint=did_you_mean(name, NAMES) or "unset it",
            )
    return Environment(
        profile=environ.get(PROFILE) or None,
        plan=Path(environ[PLAN]) if environ.get(PLAN) else None,
        run_dir=Path(environ[RUN_DIR]) if environ.get(RUN_DIR) else None,
        disabled=_boolean(DISABLE, environ.get(DISABLE, "")),
        hardware=environ.get(HARDWARE) or None,
        calibrate_s=_seconds(CALIBRATE, environ.get(CALIBRATE, "")),
        expert_series=_boolean(EXPERT_SERIES, environ.get(EXPERT_SERIES, "")),
    )


def _seconds(name: str, text: str) -> float | None:
    if not text.strip():
        return None
    value = seconds_in(text)
    if value is None:
        raise InputError(f"environment: {name}: got {text!r:.80}, expected a number of seconds, 0 or more")
    return value


def seconds_in(text: str) -> float | None:
    """Parse a finite number of seconds, 0 or more, as "20", "2.5" or "20s"; None if it is none."""
    try:
        value = float(text.strip().removesuffix("s"))
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


def _boolean(name: str, text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise InputError(f"environment: {name}: got {text!r}, expected one of {', '.join(_TRUE + _FALSE[1:])}")
