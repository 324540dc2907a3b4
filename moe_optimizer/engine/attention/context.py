"""`AttentionContext`: where the tokens of one step stand, for every attention layer.

Legend: T tokens of the step, D decodes, L longest context, N most blocks of a sequence.
The decodes come first: tokens [0, D) are one of each decoding sequence, tokens [D, T) the packed prefills.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


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
    def decode_mask_D11L(self) -> Tensor:
        """True where a decoding sequence has a token, up to the end of the last block."""
        positions = torch.arange(self.block_tables_DN.shape[1] * self.block_size, device=self.slots_T.device)
        return (positions < self.context_lengths_D[:, None])[:, None, None, :]
