"""Reads a profile by name or file and checks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from moe_optimizer.errors import InputError
from moe_optimizer.near_match import did_you_mean
from moe_optimizer.profiles import profile_names
from moe_optimizer.profiles.schema import Profile
from moe_optimizer.resources import config_dir
from moe_optimizer.yaml_model import read_section

_ENDINGS = (".yaml", ".yml")


def load_profile(name_or_path: str) -> Profile:
    """Return a shipped profile by name, or the one in a YAML file.

    A text with a folder separator or a .yaml ending is a file, anything else a name.

    Raises:
        InputError: no such profile, or the file is not a valid one; the message names file, line and field.
    """
    path, origin = Path(name_or_path), name_or_path
    if "/" not in name_or_path and not name_or_path.endswith(_ENDINGS):
        names = profile_names()
        if name_or_path not in names:
            raise InputError(
                f"unknown profile {name_or_path!r:.80}, expected one of {', '.join(names)} or a file",
                hint=did_you_mean(name_or_path, names) or "a file needs a path with .yaml at its end",
            )
        path = config_dir() / f"{name_or_path}.yaml"
        origin = f"configs/{path.name}"
    return read_section(Profile, path, origin=origin, what="profile", hint_for=_flat_key_hint)


def _flat_key_hint(key: str) -> str | None:
    """Return where a key of a flat profile lives here; None for a key that is in no profile."""
    from moe_optimizer.synonyms import FLAG_KEYS, MODEL_KEYS, PROFILE_KEYS, SWITCHES

    plain = key.removeprefix("enable_").removeprefix("use_")
    plain = SWITCHES.get(plain.replace("_", "-"), plain).replace("-", "_")
    if plain in FLAG_KEYS:
        return f"it is a flag: --{plain}"
    if plain in MODEL_KEYS:
        return "leave it out: it is read from the model's config.json"
    place = PROFILE_KEYS.get(plain)
    if place is None:
        places = [each for each in _places(Profile) if plain == each.split(".")[-1] or f"passes.{plain}.mode" == each]
        place = places[0] if len(places) == 1 else None
    if place is None:
        return None
    return f"its place is `{place}`" + (" (auto, on or off)" if place.endswith(".mode") else "")


def _places(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the path of every setting of a section."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _places(kind, f"{prefix}{name}.")
        else:
            yield prefix + name
