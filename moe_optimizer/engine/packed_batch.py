"""`PackedBatch`: one step as tensors, for the model and its attention. Every process that computes it gets the same.

Legend: T tokens, S sequences, D decodes, L tokens of their longest context, N most blocks of a sequence.
The decodes come first: tokens [0, D) are one of each decoding sequence, tokens [D, T) the packed prefills.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moe_optimizer.engine.block import Copies
from moe_optimizer.engine.upload import uploaded


@dataclass(frozen=True, slots=True)
class Prefill:
    """One sequence of which several tokens are computed: tokens [begin, end) of the step."""

    begin: int
    end: int
    num_computed: int
    """Its tokens before the step's: already in the KV cache."""

    @property
    def length(self) -> int:
        """Tokens that its last one attends to."""
        return self.num_computed + self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """What is copied before a step, the tokens it computes, and where attention finds them and what they attend to."""

    copies: Copies
    token_ids_T: Tensor
    """-1 - row for a token that is still on the device: that of this row of the step before."""
    positions_T: Tensor
    slots_T: Tensor
    """Where each token's key and value go: block * block size + place in the block; -1 for one that is padding."""
    block_tables_SN: Tensor
    """Blocks of each sequence; what lies behind its context may be any block."""
    context_lengths_S: Tensor
    """Tokens that the last token of each sequence attends to, the step's included; 0 for one that is padding."""
    query_starts_S1: Tensor
    """Where each sequence's tokens begin in the step, and the end of the last."""
    sampled: Tensor
    """The tokens whose logits are wanted."""
    num_decodes: int
    prefills: tuple[Prefill, ...]
    block_size: int

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch with its tensors on a device: one copy of all that are rows of numbers."""
        rows = {name: each for name, each in vars(self).items() if isinstance(each, Tensor) and each.dim() == 1}
        moved = uploaded(torch.cat(list(rows.values())), device).split([len(each) for each in rows.values()])
        tables = uploaded(self.block_tables_SN, device)
        return replace(self, block_tables_SN=tables, **dict(zip(rows, moved, strict=True)))

    def following(self, sampled_S: Tensor) -> PackedBatch:
        """Return the batch with every token, after a step that sampled these."""
        ids_T = self.token_ids_T
        return replace(self, token_ids_T=torch.where(ids_T < 0, sampled_S[(-1 - ids_T).clamp(min=0)], ids_T))

    @cached_property
    def int32_lengths(self) -> tuple[Tensor, Tensor]:
        """Query starts and context lengths as FlashAttention reads them."""
        return self.query_starts_S1.int(), self.context_lengths_S.int()

    @cached_property
    def decode_contexts(self) -> tuple[Tensor, Tensor]:
        """The decodes' blocks [D, N], as many as the longest has, and where each has a token [D, 1, 1, L]."""
        lengths_D1 = self.context_lengths_S[: self.num_decodes, None]
        num_blocks = -(-int(lengths_D1.max()) // self.block_size)
        mask_DL = torch.arange(num_blocks * self.block_size, device=lengths_D1.device) < lengths_D1
        return self.block_tables_SN[: self.num_decodes, :num_blocks], mask_DL[:, None, None]
