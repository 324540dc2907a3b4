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
GOAL = "MOE_OPTIMIZER_GOAL"
"""What the layout over the GPUs is chosen for: latency, balanced or throughput."""
CLIENTS = "MOE_OPTIMIZER_CLIENTS"
"""Requests at the same time over all servers."""
TTFT_MS = "MOE_OPTIMIZER_TTFT_MS"
"""Limit of the predicted time to first token."""
TPOT_MS = "MOE_OPTIMIZER_TPOT_MS"
"""Limit of the predicted time per output token."""
INPUT_TOKENS = "MOE_OPTIMIZER_INPUT_TOKENS"
"""Typical prompt length."""
OUTPUT_TOKENS = "MOE_OPTIMIZER_OUTPUT_TOKENS"
"""Typical completion length."""
LAYOUT = "MOE_OPTIMIZER_LAYOUT"
"""Exactly this layout."""
LAUNCHER = "MOE_OPTIMIZER_LAUNCHER"
"""Process with which this one ends, by id and start time; the launcher sets it."""
RESTARTS = "MOE_OPTIMIZER_RESTARTS"
"""How often the launcher has started this server again after an unexpected end; the launcher sets it."""
EXPERT_SERIES = "MOE_OPTIMIZER_EXPERT_SERIES"
"""1: /metrics has the tokens of each expert, thousands of series; without it figures for each layer."""

NAMES = (PROFILE, PLAN, RUN_DIR, DISABLE, HARDWARE, CALIBRATE, LAUNCHER, RESTARTS, EXPERT_SERIES,
         GOAL, CLIENTS, TTFT_MS, TPOT_MS, INPUT_TOKENS, OUTPUT_TOKENS, LAYOUT)  # fmt: skip
GOALS = ("latency", "balanced", "throughput")
_MOST_CLIENTS = 1_048_576
_MOST_TOKENS = 16_777_216
_PREFIX = "MOE_OPTIMIZER_"
_SECONDS_OF = {"s": 1.0, "m": 60.0, "h": 3600.0}
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
    goal: str | None = None
    clients: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    layout: str | None = None


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
        goal=_one_of(GOAL, environ.get(GOAL, ""), GOALS),
        clients=_count(CLIENTS, environ.get(CLIENTS, ""), _MOST_CLIENTS),
        ttft_ms=_milliseconds(TTFT_MS, environ.get(TTFT_MS, "")),
        tpot_ms=_milliseconds(TPOT_MS, environ.get(TPOT_MS, "")),
        input_tokens=_count(INPUT_TOKENS, environ.get(INPUT_TOKENS, ""), _MOST_TOKENS),
        output_tokens=_count(OUTPUT_TOKENS, environ.get(OUTPUT_TOKENS, ""), _MOST_TOKENS),
        layout=environ.get(LAYOUT) or None,
    )


def _one_of(name: str, text: str, choices: tuple[str, ...]) -> str | None:
    if not text.strip():
        return None
    if text.strip() not in choices:
        raise InputError(f"environment: {name}: got {text!r:.80}, expected one of {', '.join(choices)}")
    return text.strip()


def _count(name: str, text: str, most: int) -> int | None:
    if not text.strip():
        return None
    digits = text.strip().lstrip("0")
    if not digits.isdecimal() or len(digits) > len(str(most)) or not 1 <= int(digits) <= most:
        raise InputError(f"environment: {name}: got {text!r:.80}, expected a whole number from 1 to {most}")
    return int(digits)


def _milliseconds(name: str, text: str) -> float | None:
    if not text.strip():
        return None
    value = milliseconds_in(text)
    if not value:
        raise InputError(f"environment: {name}: got {text!r:.80}, expected a positive number of milliseconds")
    return value


def milliseconds_in(text: str) -> float | None:
    """Parse a finite number of milliseconds, 0 or more, as "20", "2.5", "20ms" or "1.5s"; None if it is none."""
    plain = text.strip()
    if plain.endswith("ms"):
        plain = plain.removesuffix("ms")
        return None if plain.endswith(tuple(_SECONDS_OF)) else seconds_in(plain)
    seconds = seconds_in(plain)
    return seconds * 1e3 if seconds is not None and plain.endswith(tuple(_SECONDS_OF)) else seconds


def _seconds(name: str, text: str) -> float | None:
    if not text.strip():
        return None
    value = seconds_in(text)
    if value is None:
        raise InputError(f"environment: {name}: got {text!r:.80}, expected a number of seconds, 0 or more")
    return value


def seconds_in(text: str) -> float | None:
    """Parse a finite number of seconds, 0 or more, as "20", "2.5", "20s", "10m" or "1h"; None if it is none."""
    plain = text.strip()
    unit = next((each for each in _SECONDS_OF if plain.endswith(each)), "")
    try:
        value = float(plain.removesuffix(unit)) * _SECONDS_OF.get(unit, 1.0)
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
