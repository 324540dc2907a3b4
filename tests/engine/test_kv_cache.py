"""The KV cache is sized by the memory that is free."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from moe_optimizer.engine import LLM
from moe_optimizer.errors import DoesNotFitError, InputError
from tests.engine.tiny_models import TINY_MOE

BLOCK_BYTES = 4 * 2 * 16 * 2 * 64 * 4
"""Layers, keys and values, tokens, heads, elements, bytes of one in float32."""


@pytest.mark.parametrize(("room", "blocks", "longest"), [(10, 10, 160), (100_000, 3 * 2048 // 16, 2048)])
def test_free_memory_decides_the_blocks_up_to_what_the_sequences_need(
    room: int, blocks: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half of the free memory of a host is the cache's.
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * room * BLOCK_BYTES))
    llm = LLM(str(TINY_MOE), dtype="float32", device="cpu", skip_tokenizer_init=True, max_num_seqs=3)
    size = llm.llm_engine.executor.cache_size
    assert (size.num_blocks, size.max_model_len) == (blocks, longest)


def test_a_given_number_of_bytes_decides_the_blocks() -> None:
    llm = LLM(
        str(TINY_MOE), dtype="float32", device="cpu", skip_tokenizer_init=True, kv_cache_memory_bytes=7 * BLOCK_BYTES
    )
    assert llm.llm_engine.executor.cache_size.num_blocks == 7


# A prompt of one token needs room for another.
def test_a_longest_sequence_of_one_token_is_refused() -> None:
    with pytest.raises(InputError, match=r"max_model_len: got 1, expected .* 2") as refused:
        LLM(str(TINY_MOE), device="cpu", skip_tokenizer_init=True, max_model_len=1)
    assert "prompt and output" in (refused.value.hint or "")


def test_a_cache_of_one_token_is_refused() -> None:
    with pytest.raises(DoesNotFitError, match="room for 1 tokens") as refused:
        LLM(str(TINY_MOE), device="cpu", skip_tokenizer_init=True, block_size=1, num_gpu_blocks_override=1)
    assert "kv_cache_memory_bytes" in (refused.value.hint or "")
