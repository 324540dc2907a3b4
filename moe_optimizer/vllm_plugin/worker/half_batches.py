"""Patches how vLLM describes the second half of a batch to the attention kernels.

Of layers that share a cache's form vLLM describes the first and reuses that for the others with their own blocks. The
second half of a batch is taken for such another layer: FlashAttention then gets its blocks with the lengths of the
first half. Where the halves have as many requests the answers are wrong, else the worker's thread ends and vLLM waits.
That a description of a second half is asked for also shows that a step was split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_optimizer.vllm_plugin.patch import Patch
from moe_optimizer.vllm_plugin.session import current_session

OVERLAP_PASS = "dual_batch_overlap"


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    shown = False

    def get_metadata_builder(self: Any, ubatch_id: int = 0) -> Any:
        nonlocal shown
        builder = original(self, ubatch_id)
        if ubatch_id and not shown:
            shown = True
            _show_split()
        if len(self.metadata_builders) > 1:
            builder.supports_update_block_table = False
        return builder

    return get_metadata_builder


def _show_split() -> None:
    """Write into this process's proof that vLLM has split a step."""
    session = current_session()
    if session is not None and OVERLAP_PASS in session.proof.passes:
        session.proof.passes[OVERLAP_PASS].found = "steps were split"
        session.writer.touch()


HALF_BATCH_METADATA = Patch(
    target="vllm.v1.worker.utils:AttentionGroup.get_metadata_builder",
    why="the second half of a batch gets the first one's lengths (vllm#48659); a builder whose descriptions are not "
    "reused is asked for each half",
    remove_when="vLLM keeps the descriptions of the two halves apart",
    fingerprints={"0.26 and 0.32": "875aa29696c373ff"},
    replacement=_replacement,
)
