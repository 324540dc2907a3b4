"""How many tokens each expert of each layer has received: what a serving run counted, and its file."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from moe_optimizer.errors import InputError

SCHEMA_VERSION = 1
LOAD_FILE = "expert_load.json"
"""The counts of a whole server, in its run folder."""
PARTS_DIR = "expert_load"
"""Folder of the counts of each process, in the run folder; together they are LOAD_FILE."""
_MOST_TOKENS = 2**63 - 1
"""The counters are 64 bits wide."""
_MAX_FILE_BYTES = 1 << 24
"""Chosen: four times what a model of 100 layers with 1024 experts writes. Parsing can cost thirty times the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """One MoE layer."""

    index: int
    """Number of the decoder layer in the model, from 0. Dense layers in between leave gaps."""
    name: str
    """vLLM's name of the layer, for example "model.layers.0.mlp.experts"."""
    tokens: tuple[int, ...]
    """Tokens routed to each expert, by logical expert id. A token counts once for each expert that it goes to."""

    @property
    def total(self) -> int:
        """Routed tokens of all experts together: tokens times top-k."""
        return sum(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """All MoE layers of a model over one stretch of serving."""

    model: str
    num_experts: int
    """Routed experts of each MoE layer."""
    layers: tuple[LayerLoad, ...]
    """By index."""
    since: str
    """When counting began: ISO 8601 with a UTC offset."""
    steps: int
    """Forward passes that were counted."""
    schema_version: Literal[1] = SCHEMA_VERSION

    def __post_init__(self) -> None:
        indices = [layer.index for layer in self.layers]
        assert indices == sorted(set(indices)), f"layers {indices} are not in order"
        sizes = {len(layer.tokens) for layer in self.layers}
        assert sizes <= {self.num_experts}, f"layers of {sizes} experts, expected {self.num_experts}"

    def to_json(self) -> str:
        """Return the file's text; `parse_expert_load` reads it back."""
        return json.dumps(asdict(self), separators=(",", ":"))


def merge_expert_loads(parts: Sequence[ExpertLoad]) -> ExpertLoad:
    """Return the counts of several processes of one server as one: equal layers are added, different ones collected.

    Steps are the most that one process made: the stages of a pipeline take part in the same ones.

    Raises:
        InputError: there are none, or they are of different models.
    """
    if not parts:
        raise InputError("expert load: no counts to merge")
    first = parts[0]
    for other in parts[1:]:
        if (other.model, other.num_experts) != (first.model, first.num_experts):
            raise InputError(
                f"expert load: counts of two models: {first.model} with {first.num_experts} experts, "
                f"and {other.model} with {other.num_experts}"
            )
    merged: dict[int, LayerLoad] = {}
    for layer in (layer for part in parts for layer in part.layers):
        known = merged.get(layer.index)
        tokens = layer.tokens if known is None else tuple(map(sum, zip(known.tokens, layer.tokens, strict=True)))
        merged[layer.index] = LayerLoad(index=layer.index, name=layer.name, tokens=tokens)
    return ExpertLoad(
        model=first.model,
        num_experts=first.num_experts,
        layers=tuple(merged[index] for index in sorted(merged)),
        since=min((part.since for part in parts), key=datetime.fromisoformat),
        steps=max(part.steps for part in parts),
    )


def read_run_load(run_dir: Path) -> ExpertLoad:
    """Return what the processes of the server in `run_dir`, or of the servers in its folders, have counted so far.

    Raises:
        InputError: nothing was counted there, or a file is not of this kind.
    """
    own = sorted((run_dir / PARTS_DIR).glob("*.json"))
    parts = [read_expert_load(path) for path in own or sorted(run_dir.glob(f"*/{PARTS_DIR}/*.json"))]
    if not parts:
        raise InputError(
            f"{run_dir}: no expert load, expected {PARTS_DIR}/*.json",
            hint="serve with --enable-expert-load, and send requests",
        )
    return merge_expert_loads(parts)


def read_expert_load(path: Path) -> ExpertLoad:
    """Read one file.

    Raises:
        InputError: it cannot be read, or is not an expert load; the message names the field.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            # A pipe would wait for a writer, a device may never end.
            raise InputError(f"{path}: is not a regular file, expected an expert load in JSON")
        if status.st_size > _MAX_FILE_BYTES:
            raise InputError(f"{path}: got {status.st_size} bytes, expected at most {_MAX_FILE_BYTES}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text, expected an expert load in JSON") from None
    return parse_expert_load(text, origin=str(path))


def parse_expert_load(text: str, *, origin: str) -> ExpertLoad:
    """Return the expert load that `text` (JSON) is.

    Raises:
        InputError: it is none; the message names `origin` and the field.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{origin}: not JSON: {error}") from None
    fields = _fields(data, ("schema_version", "model", "num_experts", "layers", "since", "steps"), origin)
    if fields["schema_version"] != SCHEMA_VERSION:
        raise InputError(f"{origin}: schema_version: got {fields['schema_version']!r:.40}, expected {SCHEMA_VERSION}")
    num_experts = _count(fields["num_experts"], f"{origin}: num_experts", lowest=1)
    if not isinstance(fields["layers"], list):
        raise InputError(f"{origin}: layers: got {_kind(fields['layers'])}, expected an array")
    layers = [_layer(item, num_experts, f"{origin}: layers[{i}]") for i, item in enumerate(fields["layers"])]
    _check_order((layer.index for layer in layers), origin)
    return ExpertLoad(
        model=_text(fields["model"], f"{origin}: model"),
        num_experts=num_experts,
        layers=tuple(layers),
        since=_moment(fields["since"], f"{origin}: since"),
        steps=_count(fields["steps"], f"{origin}: steps"),
    )


def _layer(data: Any, num_experts: int, where: str) -> LayerLoad:
    fields = _fields(data, ("index", "name", "tokens"), where)
    tokens = fields["tokens"]
    if not isinstance(tokens, list) or len(tokens) != num_experts:
        got = f"{len(tokens)} numbers" if isinstance(tokens, list) else _kind(tokens)
        raise InputError(f"{where}.tokens: got {got}, expected {num_experts}, one for each expert")
    return LayerLoad(
        index=_count(fields["index"], f"{where}.index"),
        name=_text(fields["name"], f"{where}.name"),
        tokens=tuple(_count(item, f"{where}.tokens[{i}]") for i, item in enumerate(tokens)),
    )


def _check_order(indices: Iterable[int], origin: str) -> None:
    previous = -1
    for index in indices:
        if index <= previous:
            raise InputError(f"{origin}: layers: index {index} after {previous}, expected each once and in order")
        previous = index


def _fields(data: Any, names: tuple[str, ...], where: str) -> dict[str, Any]:
    """Return the object `data`, which must have exactly the fields `names`."""
    if not isinstance(data, dict):
        raise InputError(f"{where}: got {_kind(data)}, expected an object with {', '.join(names)}")
    for name in names:
        if name not in data:
            raise InputError(f"{where}: field {name!r} is missing")
    unknown = next((name for name in data if name not in names), None)
    if unknown is not None:
        raise InputError(f"{where}: unknown field {unknown!r:.80}, expected {', '.join(names)}")
    return data


def _count(value: Any, where: str, *, lowest: int = 0) -> int:
    if type(value) is not int or not lowest <= value <= _MOST_TOKENS:
        raise InputError(f"{where}: got {value!r:.80}, expected a whole number of at least {lowest}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: got {_kind(value)}, expected a string")
    return value


def _moment(value: Any, where: str) -> str:
    try:
        moment = datetime.fromisoformat(_text(value, where))
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise InputError(f"{where}: got {value!r:.80}, expected ISO 8601 with a UTC offset")
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")
