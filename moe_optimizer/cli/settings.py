"""Merges flags, environment and defaults into settings, each with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_optimizer import env
from moe_optimizer.cli.options import DEFAULT_CALIBRATE_S, DEFAULT_HOST, DEFAULT_PORT, AimOptions, PlanOptions
from moe_optimizer.errors import InputError
from moe_optimizer.passes.registry import PASS_NAMES, required_key, resolve_wishes
from moe_optimizer.plan.decision import Wish
from moe_optimizer.profiles import DEFAULT_PROFILE

if TYPE_CHECKING:
    from moe_optimizer.env import Environment


_DEFAULTS: Mapping[str, Any] = {
    "calibrate": DEFAULT_CALIBRATE_S,
    "model": None,
    "profile": DEFAULT_PROFILE,
    "hardware": None,
    "gpus": None,
    "batch_size": None,
    "goal": None,
    "clients": None,
    "ttft": None,
    "tpot": None,
    "input_tokens": None,
    "output_tokens": None,
    "layout": None,
    "max_model_len": None,
    "dtype": "auto",
    "host": DEFAULT_HOST,
    "port": DEFAULT_PORT,
    "engine": "vllm",
    "expert_load": None,
    "expert_load_check": None,
    "strict": False,
    "trust_remote_code": False,
}
"""Setting, which is the option of that name -> its value where neither flag nor environment gives one."""
_OF_LOAD = ("goal", "clients", "ttft", "tpot")
"""Settings whose flags mean the load itself where a command runs one."""
_ALSO_VLLMS = {
    "host": "--host",
    "port": "--port",
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "batch_size": "--max-num-seqs",
}
"""Settings that have a flag here and an argument of `vllm serve`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its value and where it comes from."""

    value: Any
    origin: str
    """"flag --X", "environment NAME", "profile NAME" or "default"."""

    @property
    def said_by(self) -> str:
        """`origin` for the beginning of an error: the flag itself, or "environment NAME"."""
        return self.origin.removeprefix("flag ")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings from flags and environment, before the profile is read."""

    values: Mapping[str, Setting]
    wishes: Mapping[str, tuple[Wish, str]]
    """Pass name or "pass.setting" -> the wish of a flag or of the environment, with its origin."""
    required: frozenset[str]
    """Names of passes that must run."""
    disabled: bool
    """Whether MOE_OPTIMIZER_DISABLE is set: stock vLLM is served."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value


def resolve(options: PlanOptions, environment: Environment) -> Settings:
    """Merge flags over environment over defaults.

    Raises:
        InputError: an unknown --require, or contradicting flags and environment.
    """
    variables = {
        "calibrate": (environment.calibrate_s, env.CALIBRATE),
        "profile": (environment.profile, env.PROFILE),
        "hardware": (environment.hardware, env.HARDWARE),
        "goal": (environment.goal, env.GOAL),
        "clients": (environment.clients, env.CLIENTS),
        "ttft": (environment.ttft_ms, env.TTFT_MS),
        "tpot": (environment.tpot_ms, env.TPOT_MS),
        "input_tokens": (environment.input_tokens, env.INPUT_TOKENS),
        "output_tokens": (environment.output_tokens, env.OUTPUT_TOKENS),
        "layout": (environment.layout, env.LAYOUT),
    }
    values: dict[str, Setting] = {}
    for name, default in _DEFAULTS.items():
        stated = options.model_name if name == "model" else getattr(options, name, None)
        if name in _OF_LOAD and not isinstance(options, AimOptions):
            stated = None  # of a load test
        from_variable, variable = variables.get(name, (None, ""))
        if stated is not None and stated is not False:
            values[name] = Setting(stated, f"flag --{name.replace('_', '-')}")
        elif from_variable is not None:
            values[name] = Setting(from_variable, f"environment {variable}")
        else:
            values[name] = Setting(default, "default")
    vllm_args = list(options.vllm_args.words)
    values["vllm_args"] = Setting(vllm_args, "after --" if vllm_args else "default")
    _check_said_twice(values, options.vllm_args.values)
    required = frozenset(required_key(name) for name in options.require)
    return Settings(values, _wishes(options, environment), required, environment.disabled)


def _check_said_twice(values: Mapping[str, Setting], given: Mapping[str, str]) -> None:
    """Refuse a flag and an argument after -- that set the same thing to different values."""
    for name, flag in _ALSO_VLLMS.items():
        value, said_by = values[name].value, values[name].said_by
        if said_by.startswith("--") and given.get(flag, str(value)) != str(value):
            raise InputError(
                f"{said_by} {value} before -- and {flag} {given[flag]} after it contradict each other",
                hint="give one of them",
            )


def _wishes(options: PlanOptions, environment: Environment) -> Mapping[str, tuple[Wish, str]]:
    if environment.disabled:
        wanted = [f"--enable-{flag}" for flag, on in options.switches.items() if on]
        wanted += [f"--require {name}" for name in options.require]
        if wanted:
            raise InputError(f"{wanted[0]} contradicts {env.DISABLE}=1 in the environment", hint=f"unset {env.DISABLE}")
        # The number of GPUs is no optimization: on one instead of eight the model may not fit.
        off = [name for name in PASS_NAMES if name != "parallelism"]
        return dict.fromkeys([*off, "parallelism.expert_parallel"], (Wish.OFF, f"environment {env.DISABLE}"))
    return resolve_wishes(
        enabled=[flag for flag, on in options.switches.items() if on],
        disabled=[flag for flag, on in options.switches.items() if not on],
        required=options.require,
    )
