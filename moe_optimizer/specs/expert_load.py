"""Holds how many tokens each expert of each layer has received in a serving run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Literal

from moe_optimizer.errors import InputError

SCHEMA_VERSION = 1
LOAD_FILE = "expert_load.json"
"""The counts of a whole server, in its run folder."""
PARTS_DIR = "expert_load"
"""Folder of the counts of each process, in the run folder; together they are LOAD_FILE."""
_MOST_TOKENS = 2**63 - 1
"""The counters are 64 bits wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """One MoE layer."""

    index: int
    """Number of the decoder layer in the model, from 0. Dense layers in between leave gaps."""
    name: str
    """vLLM's name of the layer, for example "model.layers.0.mlp.experts"."""
    tokens: tuple[int, ...]
    """Tokens routed to each expert, by logical expert id. A token counts once for each expert that it goes to."""

    def __post_init__(self) -> None:
        """Raise an InputError for a number that is negative, or larger than a counter holds."""
        _check_counts("index", self.index)
        _check_counts("tokens", *self.tokens)

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
        """Raise an InputError for a number out of range, a layer of other experts or not in order, a wrong `since`."""
        _check_counts("num_experts", self.num_experts, lowest=1)
        _check_counts("steps", self.steps)
        for i, layer in enumerate(self.layers):
            if len(layer.tokens) != self.num_experts:
                raise InputError(
                    f"layers[{i}].tokens: got {len(layer.tokens)} numbers, "
                    f"expected {self.num_experts}, one for each expert"
                )
        for before, after in itertools.pairwise(layer.index for layer in self.layers):
            if after <= before:
                raise InputError(f"layers: index {after} after {before}, expected each once and in order")
        try:
            has_offset = datetime.fromisoformat(self.since).tzinfo is not None
        except ValueError:
            has_offset = False
        if not has_offset:
            raise InputError(f"since: got {self.since!r:.80}, expected ISO 8601 with a UTC offset")

    def to_json(self) -> str:
        """Return the file's text; `inspection.expert_load` reads it back."""
        # Not by `asdict`, which copies every number: a worker writes it while steps wait for the interpreter.
        layers = [{"index": each.index, "name": each.name, "tokens": each.tokens} for each in self.layers]
        others = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps(others | {"layers": layers}, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFile:
    """One expert load and where it was read."""

    path: str
    load: ExpertLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementLoad:
    """One or two stretches of traffic."""

    placed_by: LoadFile
    checked_on: LoadFile | None
    """Other traffic than `placed_by`: a placement always looks good on the load that it was made for."""


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


def _check_counts(name: str, *counts: int, lowest: int = 0) -> None:
    wrong = next((count for count in counts if not lowest <= count <= _MOST_TOKENS), None)
    if wrong is not None:
        raise InputError(f"{name}: got {wrong!r:.80}, expected a whole number of at least {lowest}")
