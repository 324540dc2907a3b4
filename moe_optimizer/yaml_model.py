"""Checks a YAML document against a pydantic model; what is wrong is named with its file, line and key."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from moe_optimizer.errors import InputError
from moe_optimizer.near_match import did_you_mean
from moe_optimizer.yaml_document import YamlDocument, read_yaml


class Section(BaseModel):
    """Base of every mapping in a document: frozen, no unknown key, no conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


SectionKind = TypeVar("SectionKind", bound=Section)


def read_section(
    kind: type[SectionKind],
    path: Path,
    *,
    origin: str,
    what: str,
    hint_for: Callable[[str], str | None] = lambda _: None,
) -> SectionKind:
    """Read a file of one YAML mapping.

    Args:
        kind: what the mapping is checked against.
        path: the file.
        origin: how messages name it.
        what: what it holds, for messages about the file itself.
        hint_for: what to say about a key of the top level that is unknown; None: nothing special.

    Raises:
        InputError: unreadable, not such a YAML document, or a key that is unknown, missing or of the wrong type; the
            message is about the first in the file, a missing key last.
    """
    document = read_yaml(path, origin=origin, what=what)
    try:
        # As text: from Python values pydantic takes no list for a tuple, and no text for an enum, when it is strict.
        return kind.model_validate_json(json.dumps(document.data))
    except ValidationError as error:
        raise _input_error(error, kind, document, origin, hint_for) from None


def _input_error(
    error: ValidationError,
    kind: type[Section],
    document: YamlDocument,
    origin: str,
    hint_for: Callable[[str], str | None],
) -> InputError:
    complaints = error.errors(include_url=False, include_context=True)
    # A key that is unknown says more than the one that is missing for it.
    first = min(complaints, key=lambda each: (each["type"] == "missing", document.line(tuple(each["loc"]))))
    path = tuple(first["loc"])
    place, field = f"{origin}:{document.line(path)}", ".".join(map(str, path))
    if first["type"] == "extra_forbidden":
        key, known = str(path[-1]), tuple(_section_at(kind, path[:-1]).model_fields)
        owner = ".".join(map(str, path[:-1])) or "top level"
        return InputError(
            f"unknown key in {place} ({owner}): got `{key:.80}`, expected one of `{'`, `'.join(known)}`",
            hint=(None if path[:-1] else hint_for(key)) or did_you_mean(key, known),
        )
    if first["type"] == "missing":
        return InputError(f"{origin}: key `{field}` is missing")
    # YAML 1.1 wants the sign of an exponent.
    unsigned = first["type"] == "float_type" and isinstance(first["input"], str)
    return InputError(
        f"{place}{field and f' ({field})'}: got {json.dumps(first['input']):.80}, "
        f"expected {first['msg'].removeprefix('Input should be ')}",
        hint="write 4.8e+12, with the sign: YAML reads 4.8e12 as text" if unsigned else None,
    )


def _section_at(kind: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel]:
    for key in path:
        # The index of a list stands for its items.
        annotation = kind if isinstance(key, int) else kind.model_fields[key].annotation
        members = (annotation, *typing.get_args(annotation))
        kind = next(each for each in members if isinstance(each, type) and issubclass(each, BaseModel))
    return kind
