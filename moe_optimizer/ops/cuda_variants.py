"""The variants of the CUDA kernels: their names in tables, plans and proofs, and which of them suit a call."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_optimizer.ops.launch_geometry.direct import PAIRS, TOKENS
from moe_optimizer.ops.launch_geometry.grouped import PAIRED_TILES, TILE_TOKENS, GemmMode, choose_tile_tokens
from moe_optimizer.ops.launch_geometry.sizes import MoeSizes

_GROUPED = re.compile(r"grouped-(?P<mode>[a-z0-9_]+?)(?:-n(?P<tile>\d+)(?P<paired>x2)?)?(?:/(?P<stages>\d+))?")
_FROM_TOKENS = 4
"""Fewest tokens at which grouping them by expert comes near the direct kernels."""
_PAIRED_FROM_TOKENS_PER_EXPERT = 64
"""Fewest at which an expert fills two tiles of a useful width."""


@dataclass(frozen=True, slots=True)
class DirectVariant:
    """The two chained kernels for small batches."""

    def __str__(self) -> str:
        return "direct"


@dataclass(frozen=True, slots=True)
class GroupedVariant:
    """The grouped GEMMs."""

    mode: GemmMode
    tile_tokens: int | None = None
    num_stages: int | None = None
    paired: bool = False
    """Two blocks share an expert's weights, each with its own token tile."""

    def __str__(self) -> str:
        tile = ("" if self.tile_tokens is None else f"-n{self.tile_tokens}") + ("x2" if self.paired else "")
        stages = "" if self.num_stages is None else f"/{self.num_stages}"
        return f"grouped-{self.mode.name.lower()}{tile}{stages}"


Variant = DirectVariant | GroupedVariant


def choose_variant(sizes: MoeSizes) -> Variant:
    """Return the variant for these sizes by arithmetic, where nothing was measured."""
    if sizes.num_tokens <= TOKENS and sizes.num_pairs <= PAIRS:
        return DirectVariant()
    # FP8 x FP8 rounds the activations to 4 significant bits: it has to be asked for.
    return GroupedVariant(GemmMode.BF16 if sizes.weight_bytes == 2 else GemmMode.FP8_WEIGHTS)


def candidate_variants(sizes: MoeSizes) -> tuple[Variant, ...]:
    """Return the variants for these sizes that may take the place of vLLM's kernel, the likeliest best first.

    With FP8 weights that includes the one that quantises the activations too, as vLLM's kernel does.
    """
    chosen: list[Variant] = []
    if sizes.num_tokens <= TOKENS and sizes.num_pairs <= PAIRS:
        chosen.append(DirectVariant())
    modes = (GemmMode.BF16,) if sizes.weight_bytes == 2 else (GemmMode.FP8_WEIGHTS, GemmMode.FP8)
    for mode in modes:
        if sizes.num_tokens >= _FROM_TOKENS:
            tiles = TILE_TOKENS[mode]
            at = tiles.index(choose_tile_tokens(sizes, mode))
            chosen += [GroupedVariant(mode, tile) for tile in tiles[max(0, at - 1) : at + 2]]
            if sizes.num_pairs >= _PAIRED_FROM_TOKENS_PER_EXPERT * sizes.num_experts:
                chosen += [GroupedVariant(mode, tile, paired=True) for tile in PAIRED_TILES[mode]]
    return tuple(chosen)


def rounds_activations(name: str) -> bool:
    """Return whether the variant of this name quantises the activations to FP8."""
    variant = variant_named(name)
    return isinstance(variant, GroupedVariant) and variant.mode == GemmMode.FP8


def variant_named(name: str) -> Variant:
    """Return the variant whose `str` is `name`.

    Raises:
        ValueError: there is none; a table of other kernels was asked for.
    """
    if name == str(DirectVariant()):
        return DirectVariant()
    match = _GROUPED.fullmatch(name)
    if match is None or match["mode"].upper() not in GemmMode.__members__:
        raise ValueError(f"no kernel is called {name!r:.60}")
    tile, stages = (None if match[key] is None else int(match[key]) for key in ("tile", "stages"))
    return GroupedVariant(GemmMode[match["mode"].upper()], tile, stages, paired=match["paired"] is not None)
