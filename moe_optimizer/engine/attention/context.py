"""`AttentionContext`: where the tokens of one step stand, for every attention layer.

Legend: T tokens of the step, D decodes, P prefills, L longest context, N most blocks of a sequence.
The decodes come first: tokens [0, D) are one of each decoding sequence, tokens [D, T) the packed prefills.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prefill:
    """One sequence of which several tokens are computed."""

    begin: int
    """Its first token's place in the step."""
    end: int
    num_computed: int
    """Its tokens before the step's: already in the KV cache."""
    block_ids: Tensor
    """Blocks that hold all of its tokens, the step's included."""

    @property
    def context_length(self) -> int:
        """Tokens that its last token attends to."""
        return self.num_computed + self.end - self.begin


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
    max_context_length: int
    """Of the decodes."""
    prefills: tuple[Prefill, ...]
    block_size: int

    @cached_property
    def decode_mask_D11L(self) -> Tensor:
        """True where a decoding sequence has a token, up to the end of the last block."""
        positions = torch.arange(self.block_tables_DN.shape[1] * self.block_size, device=self.slots_T.device)
        return (positions < self.context_lengths_D[:, None])[:, None, None, :]

    @cached_property
    def prefill_cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """Offsets of each prefill's queries and contexts in their packed forms: int32 [P + 1] each."""
        queries = [prefill.end - prefill.begin for prefill in self.prefills]
        contexts = [prefill.context_length for prefill in self.prefills]
        return _offsets(queries, self.slots_T.device), _offsets(contexts, self.slots_T.device)


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(lengths), 0, out=offsets[1:])
    return offsets.to(device)
