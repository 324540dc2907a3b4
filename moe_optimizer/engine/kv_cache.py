"""`KVCache`: the keys and values of all layers, in blocks, on the device and in host memory."""

from dataclasses import dataclass
from itertools import groupby

import psutil
import torch
from torch import Tensor

from moe_optimizer.engine.block import Copies
from moe_optimizer.engine.engine_args import EngineConfig
from moe_optimizer.engine.models.decoder import CausalLM
from moe_optimizer.errors import DoesNotFitError
from moe_optimizer.ops.huge_pages import zeros

_GIB = 1 << 30
_SHARE_OF_HOST = 0.5
"""Chosen: the part of free host memory that the cache of a CPU may take. Pages never written to cost nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """Decided once the model is loaded and the memory that is left is known."""

    num_blocks: int
    """On the device."""
    num_host_blocks: int
    """In host memory, for sequences that are swapped out."""
    max_model_len: int
    """Longest sequence that the cache holds, at most what was asked for."""


class KVCache:
    """One tensor [2, blocks, block size, KV heads, head dim] per layer, and its like in host memory.

    Zeros at first: what lies behind a context is read, multiplied by 0, and must not be NaN.
    """

    def __init__(self, config: EngineConfig, model: CausalLM, size: CacheSize) -> None:
        self._num_blocks = size.num_blocks
        self._layers: list[tuple[Tensor, Tensor]] = []
        for attention in model.attention_layers():
            shape = attention.kv_cache_shape(size.num_blocks, config.args.block_size)
            attention.kv_cache = zeros(shape, config.dtype, config.device)
            host_shape = attention.kv_cache_shape(size.num_host_blocks, config.args.block_size)
            self._layers.append((attention.kv_cache, zeros(host_shape, config.dtype, torch.device("cpu"))))

    def copy(self, copies: Copies) -> None:
        """Copy blocks, neighbours between the same two memories at once."""
        for (source, target), pairs in groupby(copies, lambda pair: [number >= self._num_blocks for number in pair]):
            froms, tos = torch.tensor(list(pairs)).T - torch.tensor([[source], [target]]) * self._num_blocks
            for layer in self._layers:
                moved = layer[source][:, froms.to(layer[source].device)]
                layer[target][:, tos.to(layer[target].device)] = moved.to(layer[target].device)


def fit_cache(config: EngineConfig, model: CausalLM) -> CacheSize:
    """Return the size of the cache that arguments and memory allow; of several ranks the one with the least decides."""
    args = config.args
    per_block = sum(layer.kv_cache_shape(1, args.block_size).numel() for layer in model.attention_layers())
    block_bytes = per_block * config.dtype.itemsize
    needed = -(-config.max_model_len // args.block_size)
    if args.num_gpu_blocks_override is not None:
        num_blocks = args.num_gpu_blocks_override
    elif args.kv_cache_memory_bytes is not None:
        num_blocks = args.kv_cache_memory_bytes // block_bytes
    else:
        sharing = 1 if config.device.type == "cuda" else model.ranks.size
        free = model.ranks.least(_free_bytes(config) // sharing)
        num_blocks = min(needed * args.max_num_seqs, free // block_bytes)
    longest = min(config.max_model_len, num_blocks * args.block_size)
    # A prompt of one token, and room for another.
    if longest < 2 or (args.max_model_len is not None and longest < args.max_model_len):
        raise DoesNotFitError(
            f"KV cache: got room for {max(num_blocks, 0) * args.block_size} tokens, expected at least "
            f"{config.max_model_len} (max_model_len), {needed * block_bytes / _GIB:.2f} GiB",
            hint="lower max_model_len, or raise gpu_memory_utilization or kv_cache_memory_bytes",
        )
    num_host_blocks = int(args.swap_space * _GIB) // block_bytes
    return CacheSize(num_blocks=num_blocks, num_host_blocks=num_host_blocks, max_model_len=longest)


def _free_bytes(config: EngineConfig) -> int:
    if config.device.type != "cuda":
        return int(_SHARE_OF_HOST * psutil.virtual_memory().available)
    free, total = torch.cuda.mem_get_info(config.device)
    # A step needs logits in float32 with a sampler's copies, and some thirty activations as wide as the hidden state.
    logits = 5 * 4 * config.args.max_num_seqs * config.hf_config.vocab_size
    activations = 30 * 4 * config.args.max_num_batched_tokens * config.hf_config.hidden_size
    return int(free - (1 - config.args.gpu_memory_utilization) * total) - logits - activations
