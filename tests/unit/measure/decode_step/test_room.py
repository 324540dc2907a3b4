"""Which batches an engine holds, over how many tokens, and what becomes of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.measure.decode_step.profiled_steps import StepProfile, StepsRequest, profile_batches
from moe_optimizer.measure.decode_step.room import Room


def _engine(*, blocks: int, sequences: int = 256, longest: int = 4096, **cache: Any) -> Any:
    """An engine's configuration; its cache has blocks of 16 tokens, its steps 8192 tokens."""
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=16, **cache),
            scheduler_config=SimpleNamespace(max_num_seqs=sequences, max_num_batched_tokens=8192),
            model_config=SimpleNamespace(max_model_len=longest),
        )
    )


def _asked(batches: tuple[int, ...], *contexts: int, shorter: bool = True) -> StepsRequest:
    return StepsRequest(
        model="m", serve_args=(), batches=batches, contexts=contexts or (512,) * len(batches), shorter=shorter, steps=20
    )


def _profiled(engine: Any, request: StepsRequest) -> tuple[list[tuple[int, int]], list[str]]:
    def profile(_engine: Any, batch: int, context: int, _answer: int, _steps: int) -> StepProfile:
        return StepProfile(batch=batch, context=context, step_us=1.0, kernels=())

    profiles, remarks = profile_batches(engine, request, lambda _share, _text: None, profile)
    return [(each.batch, each.context) for each in profiles], remarks


def test_the_batch_that_does_not_fit_has_shorter_sequences_and_the_others_stay() -> None:
    # 256 sequences of 512 tokens and their answers take 150,000 tokens, of 256 tokens 84,000.
    profiles, remarks = _profiled(_engine(blocks=110_000 // 16), _asked((1, 64, 256)))
    assert profiles == [(1, 512), (64, 512), (256, 256)]
    assert remarks == ["256 sequences have 256 tokens each: 512 do not fit"]


def test_the_batch_that_fits_in_no_way_is_left_out_with_the_reason() -> None:
    profiles, remarks = _profiled(_engine(blocks=20_000 // 16), _asked((1, 256)))
    assert profiles == [(1, 512)]
    assert [remark.startswith("left out: 256 sequences of 64 tokens") for remark in remarks] == [True]


def test_more_sequences_than_vllm_decodes_together_are_left_out_with_the_flag() -> None:
    profiles, remarks = _profiled(_engine(blocks=100_000, sequences=128), _asked((64, 256)))
    assert profiles == [(64, 512)]
    assert "at most 128" in remarks[0]
    assert "--max-num-seqs" in remarks[0]


def test_the_second_side_has_the_contexts_of_the_first_or_none() -> None:
    engine = _engine(blocks=88_000 // 16)
    assert _profiled(engine, _asked((1, 256), 512, 256, shorter=False))[0] == [(1, 512), (256, 256)]
    profiles, remarks = _profiled(engine, _asked((1, 256), 512, 512, shorter=False))
    assert profiles == [(1, 512)]
    assert remarks[0].startswith("left out: 256 sequences of 512 tokens")


def test_the_first_side_leaves_room_for_a_second_with_a_tenth_less() -> None:
    first, second = _engine(blocks=160_000 // 16), _engine(blocks=144_000 // 16)
    profiles, _ = _profiled(first, _asked((128, 256)))
    contexts = tuple(context for _, context in profiles)
    assert _profiled(second, _asked((128, 256), *contexts, shorter=False))[0] == profiles


def test_a_batch_that_does_not_decode_together_after_all_costs_no_other() -> None:
    def profile(_engine: Any, batch: int, context: int, _answer: int, _steps: int) -> StepProfile:
        if batch == 8:
            raise UnsupportedError("8 sequences of 512 tokens do not decode together here: 5 do")
        return StepProfile(batch=batch, context=context, step_us=1.0, kernels=())

    profiles, remarks = profile_batches(
        _engine(blocks=100_000), _asked((1, 8, 64)), lambda _share, _text: None, profile
    )
    assert [each.batch for each in profiles] == [1, 64]
    assert remarks == ["left out: 8 sequences of 512 tokens do not decode together here: 5 do"]


def test_no_sequence_is_longer_than_the_model_takes() -> None:
    assert _profiled(_engine(blocks=100_000, longest=512), _asked((8,)))[0] == [(8, 256)]


def test_the_cache_of_a_model_with_several_kinds_of_layers_is_counted_by_vllm() -> None:
    # Its blocks alone would hold them.
    engine = _engine(blocks=100_000, kv_cache_size_tokens=110_000)
    assert _profiled(engine, _asked((256,)))[0] == [(256, 256)]


def test_a_sequence_can_answer_until_the_last_counted_step() -> None:
    room = Room(cache_tokens=0, block_tokens=16, sequences=256, sequence_tokens=4096, step_tokens=8192)
    # 17 steps for 256 prompts of 512 tokens beside what decodes, 16 to settle, 20 counted twice.
    assert room.answer_tokens(256, 512, 20) == 17 + 16 + 40


@pytest.mark.parametrize("tokens", [256, 200])
def test_as_many_sequences_as_a_step_has_tokens_end_all_the_same(tokens: int) -> None:
    room = Room(cache_tokens=1 << 30, block_tokens=16, sequences=256, sequence_tokens=1 << 20, step_tokens=tokens)
    assert room.context(200, 512, 20, shorter=True) == 512
