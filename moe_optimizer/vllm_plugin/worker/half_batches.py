"""Patches how vLLM describes the second half of a batch to the attention kernels.

Of layers that share a cache's form vLLM describes the first and reuses that for the others with their own blocks. The
second half of a batch is taken for such another layer: FlashAttention then gets its blocks with the lengths of the
first half. Where the halves have as many requests the answers are wrong, else the worker's thread ends and vLLM waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_optimizer.vllm_plugin.patch import Patch


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_metadata_builder(self: Any, ubatch_id: int = 0) -> Any:
        builder = original(self, ubatch_id)
        if len(self.metadata_builders) > 1:
            builder.supports_update_block_table = False
        return builder

    return get_metadata_builder


HALF_BATCH_METADATA = Patch(
    target="vllm.v1.worker.utils:AttentionGroup.get_metadata_builder",
    why="the second half of a batch gets the first one's lengths (vllm#48659); a builder whose descriptions are not "
    "reused is asked for each half",
    remove_when="vLLM keeps the descriptions of the two halves apart",
    fingerprints={"0.26 and 0.32": "875aa29696c373ff"},
    replacement=_replacement,
)
