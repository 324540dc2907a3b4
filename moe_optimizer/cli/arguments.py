"""Splits the raw argument list into ours and `vllm serve`'s, and refuses what contradicts itself."""

from __future__ import annotations

from collections.abc import Sequence

from moe_optimizer.errors import InputError
from moe_optimizer.synonyms import SWITCHES

REPEATABLE = frozenset({"--require"})
"""Options that may be given more than once."""
_SWITCH_PREFIXES = ("--enable-", "--disable-")


def split_at_separator(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the arguments before the first `--` and those after it; None for the latter when there is no `--`."""
    if "--" not in arguments:
        return list(arguments), None
    position = arguments.index("--")
    return list(arguments[:position]), list(arguments[position + 1 :])


def with_our_switches(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with every --enable-X and --disable-X whose X is a synonym under our name.

    Raises:
        InputError: a switch is given under two names.
    """
    given = {name: _our_flag(name) for name in arguments if name.startswith(_SWITCH_PREFIXES)}
    for name, ours in given.items():
        other = next((each for each in given if each != name and given[each] == ours), None)
        if other is not None:
            raise InputError(f"{name} and {other}: given more than once", hint=f"they are one switch: keep {ours}")
    return [given.get(argument, argument) for argument in arguments]


def _our_flag(flag: str) -> str:
    prefix = next(prefix for prefix in _SWITCH_PREFIXES if flag.startswith(prefix))
    name = flag.removeprefix(prefix)
    return prefix + SWITCHES.get(name, name)


def check_consistency(arguments: Sequence[str]) -> None:
    """Refuse an option given twice, and --enable-X together with --disable-X.

    Option parsers silently take the last one, which may not be the one that the user relies on.

    Raises:
        InputError: naming both options.
    """
    names = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    seen: set[str] = set()
    for name in names:
        if name in seen and name not in REPEATABLE:
            raise InputError(f"{name}: given more than once", hint=f"keep one {name}")
        seen.add(name)
    for name in names:
        opposite = name.replace("--enable-", "--disable-", 1)
        if opposite != name and opposite in seen:
            raise InputError(f"{name} and {opposite} contradict each other", hint="keep one of them")
