"""Lists all passes in planning order and the flags that switch them. Passes are imported when first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from moe_optimizer.errors import InputError
from moe_optimizer.near_match import did_you_mean
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan_context.request import WishWithOrigin

# In planning order: a pass may look only at the decisions of those before it.
_PASSES = (
    ("disaggregation", "Disaggregation"),
    ("replicas", "Replicas"),
    ("parallelism", "Parallelism"),
    ("fp8", "Fp8"),
    ("four_bit", "FourBit"),
    ("sparsity_24", "Sparsity24"),
    ("flash_dmoe", "FlashDmoe"),
    ("expert_load", "ExpertLoad"),
    ("expert_placement", "ExpertPlacement"),
    ("tuned_configs", "TunedConfigs"),
    ("dual_batch_overlap", "DualBatchOverlap"),
    ("speculation", "Speculation"),
    ("scheduler", "Scheduler"),
    ("graph_capture", "GraphCapture"),
    ("norm_rope_fusion", "NormRopeFusion"),
    ("skinny_gemm", "SkinnyGemm"),
    ("kv_cache", "KvCache"),
)
PASS_NAMES = tuple(name for name, _ in _PASSES)

_CONTRADICTING_PASSES = {
    ("disaggregation", "replicas"): "each divides the devices between servers of its own",
    ("fp8", "sparsity_24"): "the experts are either pruned or quantised",
    ("four_bit", "sparsity_24"): "the experts are either pruned or quantised",
    ("expert_load", "dual_batch_overlap"): "a router sees half of the tokens at a time then, so they cannot be counted",
    (
        "flash_dmoe",
        "dual_batch_overlap",
    ): "overlap needs DeepEP, which hands over tokens as our kernels do not read them",
}
"""Pairs that may not both be asked for by flag, and why."""

_CONTRADICTING_ON_THE_CPU = {
    # On GPUs FP8 is then for the other weights.
    ("fp8", "four_bit"): "the experts have either four bits or eight",
}

_NEEDS = {
    "dual_batch_overlap": ("parallelism", "parallelism.expert_parallel"),
    "expert_placement": ("parallelism", "parallelism.expert_parallel"),
    "four_bit": ("flash_dmoe",),
    "sparsity_24": ("flash_dmoe",),
}
"""What a pass asked for by flag cannot do without: keys that may not be switched off by flag then."""

_NEEDS_ON_THE_CPU = {
    "fp8": ("flash_dmoe",),
    "parallelism.expert_parallel": ("flash_dmoe",),
    "expert_placement": ("flash_dmoe",),
}
"""The same on vLLM's CPU build: no kernel but ours reads converted experts or follows an expert map there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One pair of flags, --enable-<flag> and --disable-<flag>."""

    flag: str
    key: str
    """What it sets in `wishes`: a pass's name, or "pass.setting"."""
    title: str

    @property
    def pass_name(self) -> str:
        """The pass it belongs to."""
        return self.key.partition(".")[0]


@cache
def all_passes() -> tuple[OptimizationPass, ...]:
    """Return one instance of every pass, in planning order."""
    return tuple(getattr(importlib.import_module(f"moe_optimizer.passes.{module}"), name)() for module, name in _PASSES)


@cache
def switches() -> tuple[Switch, ...]:
    """Return every pair of flags, those of a pass before those of its settings."""
    found: list[Switch] = []
    for each in all_passes():
        found.append(Switch(flag=each.flag, key=each.name, title=each.title))
        for flag, (setting, title) in each.setting_flags.items():
            found.append(Switch(flag=flag, key=f"{each.name}.{setting}", title=title))
    return tuple(found)


def needed_by(pass_name: str, device: str) -> tuple[str, ...]:
    """Return the passes that one cannot do without on a device, "cpu" or "cuda"."""
    needs = _NEEDS | (_NEEDS_ON_THE_CPU if device == "cpu" else {})
    keys = (each for key, needed in needs.items() if key.partition(".")[0] == pass_name for each in needed)
    return tuple(dict.fromkeys(each.partition(".")[0] for each in keys))


def required_key(text: str) -> str:
    """Return what `--require TEXT` asks for, dashes or underscores: a pass's name for its name or flag, "pass.setting"
    for the flag of a setting ("kv-tiering"). A key stays what it is.

    Raises:
        InputError: there is neither.
    """
    wanted = text.strip().lower().replace("_", "-")
    for switch in switches():
        if wanted in (switch.flag, switch.key.replace("_", "-")):
            return switch.key
    flags = [switch.flag for switch in switches()]
    raise InputError(
        f"--require: got {text!r:.80}, expected one of {', '.join(flags)}", hint=did_you_mean(wanted, flags)
    )


def resolve_wishes(
    enabled: Iterable[str], disabled: Iterable[str], required: Iterable[str] = ()
) -> Mapping[str, WishWithOrigin]:
    """Return the wishes of the flags that were given.

    Args:
        enabled: the X of every --enable-X.
        disabled: the X of every --disable-X.
        required: the X of every --require X, which asks for X as --enable-X does.

    Raises:
        InputError: an unknown X, or two flags that contradict each other; the message names both.
    """
    on = {required_key(text): f"--require {text}" for text in required}
    on |= {required_key(flag): f"--enable-{flag}" for flag in enabled}
    off = {required_key(flag): f"--disable-{flag}" for flag in disabled}
    for key, flag in on.items():
        if key in off:
            raise InputError(f"{flag} and {off[key]} contradict each other", hint="give one of them")
        owner = key.partition(".")[0]
        if owner in off and owner != key:
            raise InputError(f"{flag} and {off[owner]} contradict each other: the one is a part of the other")
    wishes = {key: (Wish.ON, f"flag {flag}") for key, flag in on.items()} | {
        key: (Wish.OFF, f"flag {flag}") for key, flag in off.items()
    }
    _check_pairs(wishes, _CONTRADICTING_PASSES)
    _check_needs(wishes, _NEEDS)
    return wishes


def check_wishes(wishes: Mapping[str, WishWithOrigin], device: Literal["cuda", "cpu"]) -> None:
    """Check wishes of flags for what only the device makes a contradiction.

    Raises:
        InputError: two contradict each other; the message names both.
    """
    if device == "cpu":
        _check_pairs(wishes, _CONTRADICTING_ON_THE_CPU)
        _check_needs(wishes, _NEEDS_ON_THE_CPU)


def _check_pairs(wishes: Mapping[str, WishWithOrigin], pairs: Mapping[tuple[str, str], str]) -> None:
    for pair, why in pairs.items():
        asked = [wishes.get(key, (Wish.AUTO, "")) for key in pair]
        if all(wish is Wish.ON for wish, _ in asked):
            flags = " and ".join(origin.removeprefix("flag ") for _, origin in asked)
            raise InputError(f"{flags} contradict each other: {why}", hint="give one of them")


def _check_needs(wishes: Mapping[str, WishWithOrigin], needs: Mapping[str, tuple[str, ...]]) -> None:
    for key, needed in needs.items():
        wish, origin = wishes.get(key, (Wish.AUTO, ""))
        for other in needed:
            other_wish, other_origin = wishes.get(other, (Wish.AUTO, ""))
            if (wish, other_wish) == (Wish.ON, Wish.OFF):
                flags = (origin.removeprefix("flag "), other_origin.removeprefix("flag "))
                raise InputError(f"{' and '.join(flags)} contradict each other: the one needs the other")
