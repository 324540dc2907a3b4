"""Reads YAML strictly: plain data only, and the line of every value is kept for error messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text

MAX_BYTES = 64 * 1024
"""A shipped profile is about 2 KB, a GPU's facts 3 KB; anything far larger is neither."""
MAX_DEPTH = 16

# libyaml's parser, where PyYAML was built with it, reads the same and takes a tenth of the time.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STRING = "tag:yaml.org,2002:str"
_SCALAR_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str"))
_ON_OFF = frozenset({"on", "off", "yes", "no"})


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A document's data and where each part of it stands."""

    data: Any
    lines: Mapping[tuple[str | int, ...], int]
    """Path of keys and indices -> line, counted from 1. A key's line is where the key is written."""

    def line(self, path: tuple[str | int, ...]) -> int:
        """Return the line of `path`, or of the nearest part above it that is in the document."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def read_yaml(path: Path, *, origin: str, what: str) -> YamlDocument:
    """Read a file of one YAML document; see `parse_yaml`.

    Args:
        path: the file.
        origin: how messages name it.
        what: what it holds, for messages about the file itself.

    Raises:
        InputError: it cannot be read, or is not such a document.
    """
    return parse_yaml(read_text(path, max_bytes=MAX_BYTES, name=f"{what} {origin}"), origin=origin)


def parse_yaml(text: str, *, origin: str) -> YamlDocument:
    """Parse one YAML document of mappings, lists and plain scalars.

    `on`, `off`, `yes` and `no` stay words: YAML 1.1 would make booleans of them, and `mode: off` must not
    arrive as False. Refused: anchors and aliases, tags, merge keys, duplicate keys, keys that are not strings.

    Raises:
        InputError: not YAML, too large, too deep, or one of the above; the message names `origin` and the line.
    """
    if len(text) > MAX_BYTES:
        raise InputError(f"{origin}: too large: got {len(text)} characters, expected at most {MAX_BYTES}")
    try:
        _check_events(text, origin)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise InputError(_describe(error, text, origin)) from None
    except UnicodeEncodeError as error:
        raise InputError(f"{origin}: not YAML: {error.reason}") from None
    if node is None:
        raise InputError(f"{origin}: empty, expected a YAML mapping")
    lines: dict[tuple[str | int, ...], int] = {(): node.start_mark.line + 1}
    return YamlDocument(_build(node, (), lines, origin), lines)


def _check_events(text: str, origin: str) -> None:
    """Refuse what could grow, recurse or name code before any tree is built: the event stream itself is flat."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise InputError(f"{origin}:{line}: anchors and aliases are not allowed here")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise InputError(f"{origin}:{line}: tags are not allowed here: got {tag!r:.60}")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise InputError(f"{origin}:{line}: nested more than {MAX_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _build(node: yaml.Node, path: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int], origin: str) -> Any:
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, line = _key(key_node, origin), key_node.start_mark.line + 1
            if key in result:
                raise InputError(f"{origin}:{line}: key `{key}` is given twice, first on line {lines[(*path, key)]}")
            lines[(*path, key)] = line
            result[key] = _build(value_node, (*path, key), lines, origin)
        return result
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
        return [_build(item, (*path, index), lines, origin) for index, item in enumerate(node.value)]
    return _scalar(node, origin)


def _key(node: yaml.Node, origin: str) -> str:
    if isinstance(node, yaml.ScalarNode) and (node.tag == _STRING or node.value.lower() in _ON_OFF):
        return node.value
    raise InputError(f"{origin}:{node.start_mark.line + 1}: got key {_shown(node)}, expected a plain word")


def _scalar(node: yaml.Node, origin: str) -> Any:
    line = node.start_mark.line + 1
    if node.tag not in _SCALAR_TAGS or not isinstance(node, yaml.ScalarNode):
        raise InputError(f"{origin}:{line}: got {_shown(node)}, expected a number, true, false, null or a word")
    if node.tag == _STRING or node.value.lower() in _ON_OFF:
        return node.value
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{origin}:{line}: got {_shown(node)}: {error}") from None


def _shown(node: yaml.Node) -> str:
    value = node.value if isinstance(node, yaml.ScalarNode) else node.tag.rpartition(":")[2]
    return f"{value!r:.60}"


def _describe(error: yaml.YAMLError, text: str, origin: str) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    if mark is None:
        return f"{origin}: not YAML: {problem}"
    # libyaml puts the end of a text on the line after its last.
    line = min(mark.line, text.count("\n")) + 1
    return f"{origin}:{line}: not YAML: {problem}"
