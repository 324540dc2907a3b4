"""An executor without a model: its KV cache holds token ids, and a token is a hash of what it reads there.

It reads and writes through slots, block tables and moves as a model does, so a block that is shared, moved, evicted or
overwritten by mistake changes the tokens.
"""

from __future__ import annotations

import zlib

import numpy as np

from moe_optimizer.engine.block import Block
from moe_optimizer.engine.kv_cache import CacheSize
from moe_optimizer.engine.sampled_tokens import SampledTokens
from moe_optimizer.engine.scheduler_output import SchedulerOutput
from moe_optimizer.engine.sequence import Sequence

VOCABULARY = 50


class PaperExecutor:
    def __init__(self, num_blocks: int, block_size: int, *, num_host_blocks: int = 0, max_model_len: int = 64) -> None:
        self.cache_size = CacheSize(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_model_len=min(max_model_len, num_blocks * block_size),
        )
        self.block_size = block_size
        self.cache = np.full((num_blocks + num_host_blocks, block_size), -1)
        self.num_computed = 0
        self.sampled: list[int] = []
        """By the step before."""
        self.blocks: list[Block] = []
        """The block manager's, to see that nobody writes into a block that others read."""

    def launch(self, step: SchedulerOutput) -> SampledTokens:
        for source, target in step.copies:
            self.cache[target] = self.cache[source]
        for sequence in step.decodes:
            self._compute(sequence, 1)
        for sequence, count in step.prefills:
            self._compute(sequence, count)
        self.sampled = [self._sample(sequence) for sequence in step.sampled]
        for row, sequence in enumerate(step.sampled):
            sequence.row = row
        return SampledTokens.of(self.sampled)

    def _compute(self, sequence: Sequence, count: int) -> None:
        self.num_computed += count
        for position in range(sequence.num_computed_tokens, sequence.num_computed_tokens + count):
            block = sequence.block_table.block_ids[position // self.block_size]
            assert block < self.cache_size.num_blocks, f"block {block} is in host memory"
            assert not self.blocks or self.blocks[block].writable, f"block {block} is written while others read it"
            known = position < len(sequence.token_ids)
            token_id = sequence.token_ids[position] if known else self.sampled[sequence.row]
            self.cache[block, position % self.block_size] = token_id

    def _sample(self, sequence: Sequence) -> int:
        context = self.cache[list(sequence.block_table.block_ids)].flatten()[: sequence.num_tokens]
        return next_token(context.tolist(), sequence.index)


def next_token(token_ids: list[int], sample: int) -> int:
    return zlib.crc32(repr((token_ids, sample)).encode()) % VOCABULARY


def expected_output(prompt: list[int], num_tokens: int, sample: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, sample))
    return token_ids[len(prompt) :]
