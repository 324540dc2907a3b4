"""`PackedBatch`: one step as numbers. Every process that computes the step is given the same one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_optimizer.engine.attention.context import Prefill
from moe_optimizer.engine.scheduler_output import Copies, SchedulerOutput
from moe_optimizer.engine.sequence import Sequence

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """T tokens of S sequences: the decodes first, one token each, then the prefills, one behind the other."""

    token_ids: Numbers
    positions: Numbers
    slots: Numbers
    """Where each token's key and value go: block * block size + place in the block."""
    context_lengths: Numbers
    """Of each sequence: the tokens that its last one attends to."""
    block_tables: NDArray[np.int32]
    """[S, N], padded with zeros."""
    num_decodes: int
    prefills: tuple[Prefill, ...]
    sampled: Numbers
    """The tokens whose logits are wanted."""
    swap_out: Copies
    copies: Copies
    swap_in: Copies

    @classmethod
    def of(cls, step: SchedulerOutput, block_size: int) -> PackedBatch:
        """Pack a step that the scheduler has made room for."""
        num_decodes = len(step.decodes)
        spans = [(each, each.num_computed_tokens, each.num_computed_tokens + 1) for each in step.decodes]
        spans += [(each, each.num_computed_tokens, each.num_computed_tokens + count) for each, count in step.prefills]
        token_ids: list[int] = []
        positions: list[int] = []
        prefills: list[Prefill] = []
        sampled = list(range(num_decodes))
        for sequence, begin, end in spans:
            if len(positions) >= num_decodes:
                prefills.append(Prefill(len(positions), len(positions) + end - begin, begin))
                if end == sequence.num_tokens:
                    sampled.append(prefills[-1].end - 1)
            token_ids += sequence.token_ids[begin:end]
            positions += range(begin, end)
        block_tables = _block_tables([sequence for sequence, _, _ in spans])
        places = np.array(positions, np.int64)
        rows = np.repeat(np.arange(len(spans)), [end - begin for _, begin, end in spans])
        return cls(
            token_ids=np.array(token_ids, np.int64),
            positions=places,
            slots=block_tables[rows, places // block_size] * np.int64(block_size) + places % block_size,
            context_lengths=np.array([end for _, _, end in spans], np.int64),
            block_tables=block_tables,
            num_decodes=num_decodes,
            prefills=tuple(prefills),
            sampled=np.array(sampled, np.int64),
            swap_out=step.swap_out,
            copies=step.copies,
            swap_in=step.swap_in,
        )


def _block_tables(sequences: list[Sequence]) -> NDArray[np.int32]:
    tables = [sequence.block_table.block_ids for sequence in sequences]
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
