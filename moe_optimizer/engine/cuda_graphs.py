"""`DecodeGraphs`: a decode step as a CUDA graph, one for each of a few batch sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_optimizer.engine.packed_batch import PackedBatch
from moe_optimizer.engine.upload import uploaded
from moe_optimizer.log import get_logger

_log = get_logger(__name__)
Compute = Callable[[PackedBatch], Tensor]
"""A batch to the last hidden state of every token."""
_LARGEST = 512


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return 1, 2, 4, 8, 16, 32, 48 .. up to the number of sequences, which is one of them, and 512 at most."""
    most = min(max_num_seqs, _LARGEST)
    return sorted({size for size in (1, 2, 4, 8, *range(16, most, 16), most) if size <= most})


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    numbers_4S: Tensor
    """Token ids, positions, slots and context lengths."""
    hidden_SH: Tensor


class DecodeGraphs:
    """Launches a whole decode step at once, padded to the next of the captured `sizes`, which ascend.

    `max_blocks` are the most of a sequence.
    """

    def __init__(
        self, compute: Compute, sizes: list[int], *, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self._compute, self._block_size = compute, block_size
        self._graphs: dict[int, _Graph] = {}
        self._tables_SN = torch.zeros((sizes[-1], max_blocks), dtype=torch.int32, device=device)
        self._starts_S1 = torch.arange(sizes[-1] + 1, device=device)
        pool = torch.cuda.graph_pool_handle()
        try:
            # The largest first: the others fit into its memory.
            for size in reversed(sizes):
                self._graphs[size] = self._capture(size, pool)
        except RuntimeError as error:
            self._graphs = {}
            _log.warning("decodes run without CUDA graphs, many small launches slower: capture failed: %s", error)

    @property
    def sizes(self) -> list[int]:
        return sorted(self._graphs)

    def hidden(self, batch: PackedBatch) -> Tensor | None:
        """Return the last hidden states of a batch of decodes, which the next call overwrites; None without a graph."""
        count = batch.num_decodes
        size = next((size for size in self.sizes if size >= count), None)
        if batch.prefills or size is None:
            return None
        captured = self._graphs[size]
        numbers_4S = np.zeros((4, size), np.int64)
        numbers_4S[2, count:] = -1
        numbers_4S[:, :count] = batch.token_ids_T, batch.positions_T, batch.slots_T, batch.context_lengths_S
        tables_SN = uploaded(batch.block_tables_SN, self._tables_SN.device)
        self._tables_SN[:count, : tables_SN.shape[1]].copy_(tables_SN)
        captured.numbers_4S.copy_(uploaded(torch.from_numpy(numbers_4S), self._tables_SN.device))
        captured.graph.replay()
        return captured.hidden_SH[:count]

    def _capture(self, size: int, pool: Any) -> _Graph:
        numbers_4S = torch.zeros((4, size), dtype=torch.int64, device=self._tables_SN.device)
        numbers_4S[2] = -1
        token_ids, positions, slots, lengths = numbers_4S
        batch = PackedBatch(
            copies=[], token_ids_T=token_ids, positions_T=positions, slots_T=slots,
            block_tables_SN=self._tables_SN[:size], context_lengths_S=lengths,
            query_starts_S1=self._starts_S1[: size + 1], sampled=self._starts_S1[:size],
            num_decodes=size, prefills=(), block_size=self._block_size,
        )  # fmt: skip
        # Twice outside: at the first call kernels are compiled and libraries make workspaces; the second raises at
        # what waits for the host, such as experts in plain torch, where a capture that fails leaves a broken stream.
        self._compute(batch)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._compute(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden_SH = self._compute(batch)
        return _Graph(graph, numbers_4S, hidden_SH)
