"""The order of the token-expert pairs, as grouped GEMMs of other libraries need it.

It is made before the timed call, as the tests and benchmarks of these libraries make it: their time has no sort.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PairOrder:
    """The pairs sorted by expert; a pair is token * top_k + slot."""

    sorted_pairs: Tensor
    """int32 [pairs]."""
    counts: Tensor
    """int64 [experts]: pairs of each."""
    rank: Tensor
    """int64 [pairs]: place of a sorted pair among those of its expert."""
    expert: Tensor
    """int64 [pairs]: of a sorted pair."""

    @property
    def offsets(self) -> Tensor:
        """int32 [experts + 1]: where an expert's pairs begin."""
        zero = torch.zeros(1, dtype=torch.int64, device=self.counts.device)
        return torch.cat((zero, self.counts.cumsum(0))).int()

    def aligned_offsets(self, alignment: int) -> Tensor:
        """int64 [experts + 1]: where they begin if each expert has whole multiples of `alignment` rows."""
        padded = (self.counts + alignment - 1) // alignment * alignment
        zero = torch.zeros(1, dtype=torch.int64, device=self.counts.device)
        return torch.cat((zero, padded.cumsum(0)))

    def rows_of_pairs(self, starts: Tensor) -> Tensor:
        """int64 [pairs], by pair: its row where the rows of expert e begin at starts[e]."""
        rows = torch.empty_like(self.rank)
        rows[self.sorted_pairs.long()] = starts[self.expert] + self.rank
        return rows

    def blocks(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks of `size` pairs of one expert: pairs (their number as padding), expert of each block, full length."""
        starts = self.aligned_offsets(size)
        total = int(starts[-1])
        pairs = torch.full((total,), self.sorted_pairs.numel(), dtype=torch.int32, device=self.counts.device)
        pairs[starts[self.expert] + self.rank] = self.sorted_pairs
        experts = torch.repeat_interleave(
            torch.arange(self.counts.numel(), device=self.counts.device), starts.diff() // size
        ).int()
        return pairs, experts, torch.tensor([total], dtype=torch.int32, device=self.counts.device)


def pair_order(topk_ids: Tensor, experts: int) -> PairOrder:
    """Sort the pairs of a call by expert, in the order of the tokens."""
    ids = topk_ids.flatten().long()
    by_expert, order = ids.sort(stable=True)
    counts = torch.bincount(ids, minlength=experts)
    starts = counts.cumsum(0) - counts
    rank = torch.arange(ids.numel(), device=ids.device) - starts[by_expert]
    return PairOrder(order.int(), counts, rank, by_expert)
