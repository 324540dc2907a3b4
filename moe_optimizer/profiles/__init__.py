"""Reads profiles: what the user wishes for, as strict YAML. Nothing here knows a model or a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_optimizer.resources import config_dir

if TYPE_CHECKING:
    from moe_optimizer.profiles.schema import Profile

DEFAULT_PROFILE = "balanced"


def load_profile(name_or_path: str) -> Profile:
    """Return a shipped profile by name, or the one in a YAML file.

    Raises:
        InputError: no such profile, or the file is not a valid one; the message names file, line and field.
    """
    from moe_optimizer.profiles.loader import load_profile as load

    return load(name_or_path)


def profile_names() -> tuple[str, ...]:
    """Return the names of the shipped profiles, sorted."""
    return tuple(sorted(path.stem for path in config_dir().glob("*.yaml")))
