"""vLLM's FlashAttention backend of a layer, with our kernel for decode steps of few requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.ops.kernel_arguments import PagedDecode
from moe_optimizer.ops.paged_decode import run_kernel

NO_WINDOW = (-1, -1)
"""FlashAttention's word for attention to all keys before."""
_OTHER_MASKS = ("mm_prefix_range_tensor", "mm_prefix_query_range_tensor", "rswa_prefix_lens")
"""Fields of vLLM's metadata, of one version or another, that change what a query sees."""


@dataclass(slots=True)
class ChosenDecode:
    """What the layers of one shape look up."""

    max_tokens: int = 0
    """Requests up to which our kernel computes."""
    on_use: Callable[[], None] | None = None
    """Called when our kernel is launched for a forward."""
    on_refusal: Callable[[str], None] | None = None
    """Called with the reason if the kernel does not cover a call; FlashAttention computes it and all later ones."""


class DecodeAttentionImpl(FlashAttentionImpl):
    """vLLM's in all but the forward of a decode step of few requests.

    Args:
        stock: the layer's own.
        chosen: up to how many requests our kernel computes.
    """

    def __init__(self, stock: FlashAttentionImpl, chosen: ChosenDecode) -> None:
        vars(self).update(vars(stock))
        self.chosen = chosen
        self._slots: torch.Tensor | None = None  # of keys that are left to the forward of the same step

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store the step's keys and values in the cache, or leave that to our kernel in the forward that follows.

        Not with piecewise graphs: one of them may hold this call as it was when it was captured, and the forward, which
        runs between them, would then see other steps.
        """
        metadata, *_ = get_attention_context(layer.layer_name)
        together = get_forward_context().cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE
        if together and is_decode(metadata, self.chosen.max_tokens):
            self._slots = slot_mapping
        else:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(  # noqa: PLR0917 - vLLM's signature
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: Any,
        value: Any,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> torch.Tensor:
        """Write the attention into `output` and return it; shapes as in vLLM's.

        The launch before makes queries, keys and values, or stores the step's in the cache (`do_kv_cache_update`),
        which is all that our kernel lets it write.
        """
        slots, self._slots = self._slots, None
        if output_scale is None and output_block_scale is None and is_decode(attn_metadata, self.chosen.max_tokens):
            tokens = attn_metadata.num_actual_tokens
            new = () if slots is None else (key[:tokens], value[:tokens], slots[:tokens])
            step = (query[:tokens], kv_cache, attn_metadata.block_table, attn_metadata.seq_lens)
            call = PagedDecode(*step, self.scale, output[:tokens], *new)
            if self._computed(call):
                return output
        if slots is not None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slots)
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )

    def _computed(self, call: PagedDecode) -> bool:
        """Return whether our kernel computes a call."""
        chosen = self.chosen
        try:
            run_kernel(call)
        except UnsupportedError as error:
            chosen.max_tokens = 0
            if chosen.on_refusal is not None:
                chosen.on_refusal(str(error))
            return False
        if chosen.on_use is not None:
            chosen.on_use()
        return True


def is_decode(metadata: Any, max_tokens: int) -> bool:
    """Return whether a step has one token of each of up to `max_tokens` requests, which sees all keys before it.

    In a captured graph `metadata` is that of the capture, and every later step of the graph must be such a step.
    """
    if metadata is None or metadata.max_query_len != 1 or not 0 < metadata.num_actual_tokens <= max_tokens:
        return False
    return (
        metadata.seq_lens.shape[0] == metadata.num_actual_tokens
        and metadata.causal is True
        and not getattr(metadata, "use_cascade", False)
        and getattr(metadata, "sliding_window", None) in (None, NO_WINDOW)
        and all(getattr(metadata, name, None) is None for name in _OTHER_MASKS)
    )
