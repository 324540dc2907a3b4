"""Reads a profile by name or file and checks it."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from moe_optimizer.errors import InputError
from moe_optimizer.near_match import did_you_mean
from moe_optimizer.profiles import profile_names
from moe_optimizer.profiles.schema import Profile
from moe_optimizer.resources import config_dir
from moe_optimizer.yaml_document import YamlDocument, read_yaml

Checked = TypeVar("Checked", bound=BaseModel)
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
    return read_section(Profile, path, origin=origin, what="profile")


def read_section(kind: type[Checked], path: Path, *, origin: str, what: str) -> Checked:
    """Read and check a YAML file of one type; `origin` names it in messages, `what` says what it holds.

    Raises:
        InputError: it cannot be read, or is not valid; the message names file, line and field.
    """
    document = read_yaml(path, origin=origin, what=what)
    if not isinstance(document.data, dict):
        raise InputError(f"{origin}:1: got {_kind(document.data)}, expected a mapping of {what} keys")
    try:
        return kind.model_validate(document.data)
    except ValidationError as error:
        raise _input_error(error, document, origin, kind) from None


def _input_error(error: ValidationError, document: YamlDocument, origin: str, kind: type[BaseModel]) -> InputError:
    """Turn the first complaint, in file order, into a sentence."""
    complaints = error.errors(include_url=False, include_context=True)
    # A misspelt key is unknown and missing at once: the unknown one says more.
    first = min(complaints, key=lambda each: (document.line(tuple(each["loc"])), each["type"] != "extra_forbidden"))
    path = tuple(first["loc"])
    place = f"{origin}:{document.line(path)}"
    owner = ".".join(map(str, path[:-1])) or "top level"
    if first["type"] == "extra_forbidden":
        return _unknown_key(kind, path, place, owner)
    if first["type"] == "missing":
        return InputError(f"{origin}: key `{'.'.join(map(str, path))}` is missing")
    field = ".".join(map(str, path))
    return InputError(f"{place} ({field}): got {_kind(first['input'])}, expected {_expected(first)}")


def _unknown_key(kind: type[BaseModel], path: Sequence[str | int], place: str, owner: str) -> InputError:
    *parent, key = (str(each) for each in path)
    known = tuple(_section_at(kind, parent).model_fields)
    expected = ", ".join(f"`{name}`" for name in known)
    return InputError(
        f"unknown key in {place} ({owner}): got `{key:.80}`, expected one of {expected}",
        hint=(None if parent or kind is not Profile else _flat_key_hint(key)) or did_you_mean(key, known),
    )


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


def _section_at(kind: type[BaseModel], path: Sequence[str]) -> type[BaseModel]:
    """Return the type of the section at a path; an index of a list stands for the list's items."""
    for key in path:
        annotation: Any = kind if key.isdecimal() else kind.model_fields[key].annotation
        found = [annotation, *typing.get_args(annotation)]
        kind = next(each for each in found if isinstance(each, type) and issubclass(each, BaseModel))
    return kind


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return f"the text {value!r:.80}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value}"[:80]


_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def _expected(complaint: Any) -> str:
    kind, context = complaint["type"], complaint.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "`")
    if kind == "greater_than_equal":
        return f"at least {context['ge']}"
    if kind == "less_than_equal":
        return f"at most {context['le']}"
    return _EXPECTED.get(kind) or str(complaint["msg"])
