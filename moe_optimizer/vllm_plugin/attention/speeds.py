"""Times our kernel beside vLLM's own attention while a worker loads, on caches that are read cold."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_optimizer.ops.kernel_arguments import PagedDecode
from moe_optimizer.ops.paged_decode import MAX_TOKENS, run_kernel
from moe_optimizer.vllm_plugin import graph_times

TOKENS = (1, 2, 4, MAX_TOKENS)
"""Requests for which both are timed; what wins at two neighbours wins between them."""
_LENGTHS = (512, 4096, 32768)
"""Keys of each request, as far as the server allows them. One captured graph serves all lengths: ours has to win at
each."""
_POOL_BYTES = 256 << 20
"""Of the cache that calls read in turns: five times what L2 of an H100 or H200 holds."""
_MOST_CALLS, _LEAST_CALLS = 320, 8
"""With so many, calls of 170 KB still read more than L2 holds."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds of one layer: the new keys are stored, then attention; and what makes its queries before."""

    tokens: int
    length: int
    ours_us: float
    vllm_us: float

    @property
    def is_faster(self) -> bool:
        """Whether ours is faster by more than noise."""
        return self.ours_us <= graph_times.MARGIN * self.vllm_us


def times(layer: Any, vllm_config: Any) -> tuple[Timed, ...]:
    """Time both for one of vLLM's attention layers, from one request on, up to where ours is not faster at a length."""
    pool = Pool(layer, vllm_config)
    found: list[Timed] = []
    for tokens in TOKENS:
        if tokens > vllm_config.scheduler_config.max_num_seqs:
            break
        longest = min(vllm_config.model_config.max_model_len, pool.keys_of_each(tokens))
        at_lengths = [pool.timed(tokens, length) for length in lengths(longest)]
        found += at_lengths
        if not all(each.is_faster for each in at_lengths):
            break
    return tuple(found)


def lengths(longest: int) -> tuple[int, ...]:
    """Return the lengths of contexts at which both are timed, of at most `longest` keys."""
    return tuple(sorted({min(length, longest) for length in _LENGTHS}))


def faster_up_to(timed: Sequence[Timed]) -> int:
    """Return up to how many requests ours is faster at every length; 0: it is not for one."""
    slower = {each.tokens for each in timed if not each.is_faster}
    return max((each.tokens for each in timed if each.tokens not in slower), default=0)


class Pool:
    """A cache for vLLM's attention layer, larger than L2, whose blocks calls read one after the other.

    Args:
        layer: vLLM's.
        vllm_config: of the server.
    """

    def __init__(self, layer: Any, vllm_config: Any) -> None:
        self._layer, self._impl = layer, layer.impl
        self._max_model_len = vllm_config.model_config.max_model_len
        device = layer._k_scale.device
        spec = layer.get_kv_cache_spec(vllm_config)
        self._block_size, heads, size = spec.block_size, self._impl.num_kv_heads, self._impl.head_size
        block = self._block_size * heads * 2 * size
        self._blocks = max(_POOL_BYTES // (2 * block), 1)
        # Heads of a key are neighbours, as by default in vLLM; seen from outside they are the second dimension.
        stored = torch.empty((self._blocks, self._block_size, heads, 2 * size), dtype=torch.bfloat16, device=device)
        self._cache = stored.normal_().transpose(1, 2)
        self._builder = self._made_builder(layer, spec, vllm_config, device)
        self._device = device

    @staticmethod
    def _made_builder(layer: Any, spec: Any, vllm_config: Any, device: torch.device) -> Any:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(vllm_config):
            return layer.attn_backend.get_builder_cls()(spec, [layer.layer_name], vllm_config, device)

    def keys_of_each(self, tokens: int) -> int:
        """Return how many keys each of so many requests can have on blocks of its own: shared ones are in L2."""
        return self._blocks // tokens * self._block_size

    def timed(self, tokens: int, length: int) -> Timed:
        """Time both for so many requests of one length, each call on other blocks than the one before it."""
        metadata = self._metadata(tokens, length)
        width = metadata.block_table.shape[1]
        of_call = tokens * width
        count = min(max(math.ceil(self._blocks / of_call), _LEAST_CALLS), _MOST_CALLS)
        each = torch.arange(of_call, dtype=torch.int32, device=self._device).view(tokens, width)
        tables = [(each + n * of_call) % self._blocks for n in range(count)]
        source = torch.randn((tokens, self._impl.num_heads, self._impl.head_size), device=self._device).bfloat16()
        q, out = torch.empty_like(source), torch.empty_like(source)

        kv_heads, size = self._impl.num_kv_heads, self._impl.head_size
        keys, values = torch.randn((2, tokens, kv_heads, size), device=self._device).bfloat16()
        last = length - 1

        def slots_of(table: Tensor) -> Tensor:
            return table[:, last // self._block_size].long() * self._block_size + last % self._block_size

        def ours(table: Tensor, slots: Tensor) -> None:
            run_kernel(
                PagedDecode(q, self._cache, table, metadata.seq_lens, self._impl.scale, out, keys, values, slots)
            )

        def theirs(table: Tensor, slots: Tensor) -> None:
            of_call = copy.copy(metadata)
            of_call.block_table = table
            self._impl.do_kv_cache_update(self._layer, keys, values, self._cache, slots)
            self._impl.forward(self._layer, q, keys, values, self._cache, of_call, out)

        steps = [(table, slots_of(table)) for table in tables]

        def layer(attend: Callable[[Tensor, Tensor], None], table: Tensor, slots: Tensor) -> None:
            # What makes the queries stands between two calls, as in a model: without it the one would overlap the
            # other. It is a kernel, as there: a launch after a copy (a memcpy node) cannot start early.
            torch.mul(source, 1, out=q)
            attend(table, slots)

        with torch.cuda.device(self._device):
            graphs = [
                graph_times.captured([functools.partial(layer, attend, *step) for step in steps])
                for attend in (ours, theirs)
            ]
            return Timed(tokens, length, *(each / count for each in graph_times.least_us(graphs)))

    def _metadata(self, tokens: int, length: int) -> Any:
        """Return vLLM's own description of a decode step, as a captured graph has it: with the longest context."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        on_device: dict[str, Any] = {"dtype": torch.int32, "device": self._device}
        starts = torch.arange(tokens + 1, dtype=torch.int32)
        width = -(-length // self._block_size)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self._device),
            query_start_loc_cpu=starts,
            seq_lens=torch.full((tokens,), length, **on_device),
            num_reqs=tokens,
            num_actual_tokens=tokens,
            max_query_len=1,
            max_seq_len=length,
            block_table_tensor=torch.zeros((tokens, width), **on_device),
            slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=self._device),
        )
        metadata = self._builder.build(common_prefix_len=0, common_attn_metadata=common)
        metadata.max_seq_len = self._max_model_len
        return metadata
