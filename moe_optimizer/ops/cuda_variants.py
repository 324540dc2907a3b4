"""The variants of the CUDA kernels: their names in tables, plans and proofs, and which of them suit a call."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

DIRECT_TOKENS, DIRECT_PAIRS = 64, 512
"""What the tables of the direct kernels hold."""


class GemmMode(IntEnum):
    """What the tensor cores multiply; codes of csrc/include/moeopt/fused_experts.h."""

    BF16 = 0
    FP8_WEIGHTS = 1
    """E4M3 weights, BF16 tokens: weights become BF16 in registers."""
    FP8 = 2
    """E4M3 weights and tokens: x with one scale per token, h with one per token and 128."""
    MXFP4_WEIGHTS = 3
    """MXFP4 weights, BF16 tokens: weights become BF16 in registers."""
    INT4_WEIGHTS = 4
    """INT4 weights, BF16 tokens: likewise."""
    MXFP4 = 5
    """MXFP4 weights, E4M3 tokens: weights become E4M3 in registers, tokens are rounded as in FP8."""


TILE_TOKENS = {
    GemmMode.BF16: (16, 32, 64, 96, 128, 160),
    GemmMode.FP8_WEIGHTS: (16, 32, 64),
    GemmMode.FP8: (32, 64, 96, 144),
    GemmMode.MXFP4_WEIGHTS: (16, 32, 64, 128),
    GemmMode.INT4_WEIGHTS: (16, 32, 64, 128),
    GemmMode.MXFP4: (64, 96, 128),
}
"""Token tiles that are compiled (`CompiledTiles`): up to where sums and partial sums fit the registers."""
PAIRED_TILES = {
    GemmMode.BF16: (160,),
    GemmMode.FP8_WEIGHTS: (),
    GemmMode.FP8: (144,),
    GemmMode.MXFP4_WEIGHTS: (),
    GemmMode.INT4_WEIGHTS: (),
    GemmMode.MXFP4: (),
}
"""Tiles worth pairing: the widest. Two blocks that share the weights read a third less from L2."""
MODES_OF_WEIGHT_BITS = {
    16: (GemmMode.BF16,),
    8: (GemmMode.FP8_WEIGHTS, GemmMode.FP8),
    4: (GemmMode.MXFP4_WEIGHTS, GemmMode.MXFP4),
}
"""The modes that read weights of so many bits, those that keep the activations first; of INT4: `MoeSizes.modes`."""

_GROUPED = re.compile(r"grouped-(?P<mode>[a-z0-9_]+?)(?:-n(?P<tile>\d+)(?P<paired>x2)?)?(?:/(?P<stages>\d+))?")
_FROM_TOKENS = 4
"""Fewest tokens at which grouping them by expert comes near the direct kernels."""
_PAIRED_FROM_TOKENS_PER_EXPERT = 64
"""Fewest at which an expert fills two tiles of a useful width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSizes:
    """T tokens, k experts per token, E local experts, H hidden, I expert width, bits of one stored weight."""

    num_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    weight_bits: int
    """16: BF16, 8: FP8 E4M3, 4: MXFP4, or INT4 if `int4`."""
    int4: bool = False

    @property
    def num_pairs(self) -> int:
        """Token-expert pairs, T * k."""
        return self.num_tokens * self.top_k

    @property
    def modes(self) -> tuple[GemmMode, ...]:
        """The modes that read these weights, those that keep the activations first."""
        return (GemmMode.INT4_WEIGHTS,) if self.int4 else MODES_OF_WEIGHT_BITS[self.weight_bits]


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
    """None: by the average tokens per expert."""
    num_stages: int | None = None
    """None: as many as fit."""
    paired: bool = False
    """Two blocks share an expert's weights, each with its own token tile."""

    def __str__(self) -> str:
        tile = ("" if self.tile_tokens is None else f"-n{self.tile_tokens}") + ("x2" if self.paired else "")
        stages = "" if self.num_stages is None else f"/{self.num_stages}"
        return f"grouped-{self.mode.name.lower()}{tile}{stages}"


Variant = DirectVariant | GroupedVariant


def choose_tile_tokens(sizes: MoeSizes, mode: GemmMode) -> int:
    """Return the smallest compiled tile of at least 1.5 times the average tokens per expert.

    1.5: routing is uneven, and an expert that needs a second tile reads its weights again (from L2). Chosen by
    arithmetic; to be replaced by measurements.
    """
    wanted = 1.5 * sizes.num_pairs / max(1, sizes.num_experts)
    tiles = TILE_TOKENS[mode]
    return next((tile for tile in tiles if tile >= wanted), tiles[-1])


def variant_fields(variant: Variant, sizes: MoeSizes) -> dict[str, int | float | bool]:
    """Return `Variant` of csrc/launch/problem.h."""
    grouped = GroupedVariant(GemmMode.BF16) if isinstance(variant, DirectVariant) else variant
    tile = choose_tile_tokens(sizes, grouped.mode) if grouped.tile_tokens is None else grouped.tile_tokens
    return {
        "direct": isinstance(variant, DirectVariant),
        "mode": grouped.mode,
        "tile_tokens": tile,
        "num_stages": grouped.num_stages or 0,
        "paired": grouped.paired,
    }


def choose_variant(sizes: MoeSizes) -> Variant:
    """Return the variant for these sizes by arithmetic, where nothing was measured."""
    if sizes.num_tokens <= DIRECT_TOKENS and sizes.num_pairs <= DIRECT_PAIRS:
        return DirectVariant()
    # FP8 x FP8 rounds the activations to 4 significant bits: it has to be asked for.
    return GroupedVariant(sizes.modes[0])


def candidate_variants(sizes: MoeSizes, *, rounded_mxfp4: bool = False) -> tuple[Variant, ...]:
    """Return the variants for these sizes that may take the place of vLLM's kernel, the likeliest best first.

    With FP8 weights that includes the one that quantises the activations too, as vLLM's kernel does; with MXFP4 weights
    only if `rounded_mxfp4`, as vLLM's kernels keep them.
    """
    chosen: list[Variant] = []
    if sizes.num_tokens <= DIRECT_TOKENS and sizes.num_pairs <= DIRECT_PAIRS:
        chosen.append(DirectVariant())
    for mode in sizes.modes:
        if mode == GemmMode.MXFP4 and not rounded_mxfp4:
            continue
        if sizes.num_tokens >= _FROM_TOKENS:
            tiles = TILE_TOKENS[mode]
            at = tiles.index(choose_tile_tokens(sizes, mode))
            chosen += [GroupedVariant(mode, tile) for tile in tiles[max(0, at - 1) : at + 2]]
            if sizes.num_pairs >= _PAIRED_FROM_TOKENS_PER_EXPERT * sizes.num_experts:
                chosen += [GroupedVariant(mode, tile, paired=True) for tile in PAIRED_TILES[mode]]
    return tuple(chosen)


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
