"""`AttentionContext`: where the tokens of one step stand, for every attention layer.

Legend: T tokens of the step, D decodes, G decodes of a group, L longest context, N most blocks of a sequence.
The decodes come first: tokens [0, D) are one of each decoding sequence, tokens [D, T) the packed prefills.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

_MOST_PADDING = 1.25
"""Chosen: a group costs some operations per layer, padding costs reads."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """One sequence of which several tokens are computed."""

    begin: int
    """Its first token's place in the step."""
    end: int
    num_computed: int
    """Its tokens before the step's: already in the KV cache."""
    block_ids: Tensor
    """Blocks that hold its tokens up to the step's last."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar length."""

    rows_G: Tensor
    """Their places in the step."""
    block_tables_GN: Tensor
    mask_G11L: Tensor
    """True where a sequence has a token, up to the end of the group's last block."""


@dataclass(frozen=True)
class AttentionContext:
    """What attention needs to know of a step beside the tensors of the layer."""

    slots_T: Tensor
    """Where each token's key and value go: block * block size + place in the block."""
    num_decodes: int
    block_tables_DN: Tensor
    """Blocks of each decoding sequence; what lies behind its context may be any block."""
    context_lengths_D: Tensor
    """Tokens that each decoding sequence attends to, the step's included."""
    prefills: tuple[Prefill, ...]
    block_size: int

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """The decodes by length: padded to the longest of a group, they read a quarter more than they have."""
        order_D = self.context_lengths_D.argsort()
        num_blocks = [-(-length // self.block_size) for length in self.context_lengths_D[order_D].tolist()]
        begins = [0]
        for place, number in enumerate(num_blocks):
            if number > _MOST_PADDING * num_blocks[begins[-1]]:
                begins.append(place)
        return [
            self._group(order_D[begin:end], num_blocks[end - 1]) for begin, end in pairwise([*begins, len(num_blocks)])
        ]

    def _group(self, rows_G: Tensor, num_blocks: int) -> DecodeGroup:
        positions = torch.arange(num_blocks * self.block_size, device=rows_G.device)
        mask = (positions < self.context_lengths_D[rows_G, None])[:, None, None, :]
        return DecodeGroup(rows_G, self.block_tables_DN[rows_G, :num_blocks], mask)
