"""The raw argument list: what belongs to us, what to `vllm serve`, and what contradicts itself."""

from __future__ import annotations

from collections.abc import Sequence

from moe_optimizer.errors import InputError

REPEATABLE = frozenset({"--require"})
"""Options that may be given more than once."""


def split_at_separator(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the arguments before the first `--` and those after it; None for the latter when there is no `--`."""
    if "--" not in arguments:
        return list(arguments), None
    position = arguments.index("--")
    return list(arguments[:position]), list(arguments[position + 1 :])


def check_consistency(arguments: Sequence[str]) -> None:
    """Refuse an option given twice, and --enable-X together with --disable-X.

    Option parsers take the last one in silence; the user believes in the other.

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
