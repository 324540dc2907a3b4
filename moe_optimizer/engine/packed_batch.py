"""`PackedBatch`: one step as numbers. Every process that computes the step is given the same one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_optimizer.engine.attention.context import Prefill
from moe_optimizer.engine.scheduler_output import Copies, SchedulerOutput

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
        token_ids = [sequence.token_ids[-1] for sequence in step.decodes]
        positions = [sequence.num_computed_tokens for sequence in step.decodes]
        lengths, sampled = [position + 1 for position in positions], list(range(len(positions)))
        prefills: list[Prefill] = []
        for sequence, count in step.prefills:
            begin, computed = len(positions), sequence.num_computed_tokens
            token_ids += sequence.token_ids[computed : computed + count]
            positions += range(computed, computed + count)
            prefills.append(Prefill(begin, begin + count, computed))
            lengths.append(computed + count)
            if computed + count == sequence.num_tokens:
                sampled.append(begin + count - 1)
        sequences = step.decodes + [sequence for sequence, _ in step.prefills]
        tables = [sequence.block_table.block_ids for sequence in sequences]
        block_tables = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
        for row, table in zip(block_tables, tables, strict=True):
            row[: len(table)] = table
        counts = [1] * len(step.decodes) + [count for _, count in step.prefills]
        places, rows = np.array(positions, np.int64), np.repeat(np.arange(len(tables)), counts)
        return cls(
            token_ids=np.array(token_ids, np.int64),
            positions=places,
            slots=block_tables[rows, places // block_size] * np.int64(block_size) + places % block_size,
            context_lengths=np.array(lengths, np.int64),
            block_tables=block_tables,
            num_decodes=len(step.decodes),
            prefills=tuple(prefills),
            sampled=np.array(sampled, np.int64),
            swap_out=step.swap_out,
            copies=step.copies,
            swap_in=step.swap_in,
        )
