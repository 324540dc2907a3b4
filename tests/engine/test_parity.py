"""The engine's logits are those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optimizer.engine import LLMEngine, SamplingParams
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.model_runner import ModelRunner
from moe_optimizer.engine.sampled_tokens import SampledTokens
from moe_optimizer.engine.sequence import Sequence
from tests.engine.tiny_models import SHAPES, TINY_MOE

FLOAT32_BOUND = 2.3e-5
"""Largest difference of a logit; the logits of these models reach about 5."""


class TeacherForcing:
    """A sampler that keeps the logits and goes on with a given text."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.logits: dict[int, Tensor] = {}

    def sample(self, logits_SV: Tensor, sequences: list[Sequence]) -> SampledTokens:
        for row, sequence in enumerate(sequences):
            self.logits[sequence.num_tokens - 1] = logits_SV[row].clone()
        return SampledTokens.of([self.token_ids[sequence.num_tokens] for sequence in sequences])


def reference_logits(folder: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def prefill_logits(folder: Path, token_ids: list[int], **arguments: Any) -> Tensor:
    """The logits behind every token, computed in one step."""
    engine = _engine(folder, **arguments)
    runner = engine.executor
    assert isinstance(runner, ModelRunner)
    engine.add_request("0", token_ids)
    batch = runner.prepare(engine.scheduler.schedule())
    with torch.inference_mode():
        return runner.model.logits(runner.model(batch)).float()


def decode_logits(folder: Path, token_ids: list[int], num_prompt: int, **arguments: Any) -> dict[int, Tensor]:
    """The logits behind each token from the last prompt token on, computed one by one through the paged cache."""
    sampler = TeacherForcing([*token_ids, 0])
    engine = _engine(folder, sampler=sampler, **arguments)
    params = SamplingParams(max_tokens=len(token_ids) - num_prompt + 1, ignore_eos=True, detokenize=False)
    engine.add_request("0", token_ids[:num_prompt], params)
    while engine.has_unfinished_requests():
        engine.step()
    return sampler.logits


def _engine(folder: Path, *, sampler: Any = None, dtype: Any = "float32", **arguments: Any) -> LLMEngine:
    args = EngineArgs(
        model=str(folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=64,
        max_num_seqs=4,
        **arguments,
    )
    return LLMEngine(args, sampler=sampler)


def some_tokens(count: int, vocabulary: int = 97, *, seed: int = 1) -> list[int]:
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_equal_up_to_rounding(got: Tensor, want: Tensor) -> None:
    assert (got - want).abs().max() <= FLOAT32_BOUND
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert torch.equal(got.topk(5).indices.sort().values, want.topk(5).indices.sort().values)


@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_has_the_logits_of_transformers(name: str, tiny_model: Callable[..., Path]) -> None:
    folder, token_ids = tiny_model(name), some_tokens(100)
    assert_equal_up_to_rounding(prefill_logits(folder, token_ids), reference_logits(folder, token_ids))


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_chunks_and_decodes_have_the_logits_of_transformers(
    name: str, overlapped: bool, tiny_model: Callable[..., Path]
) -> None:
    # Chunks of 7 and blocks of 4: neither ends where the other does.
    folder, token_ids = tiny_model(name), some_tokens(40)
    got = decode_logits(folder, token_ids, 17, block_size=4, max_num_batched_tokens=7, async_scheduling=overlapped)
    want = reference_logits(folder, token_ids)
    assert sorted(got) == list(range(16, 40))
    assert_equal_up_to_rounding(torch.stack([got[place] for place in sorted(got)]), want[16:])


def test_the_trained_model_has_the_logits_of_transformers() -> None:
    token_ids = some_tokens(300, 2048)
    assert_equal_up_to_rounding(prefill_logits(TINY_MOE, token_ids), reference_logits(TINY_MOE, token_ids))


@pytest.mark.parametrize("name", [name for name, (family, _) in SHAPES.items() if family == "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dense_prompt_is_bit_equal_in_half_precision(name: str, dtype: str, tiny_model: Callable[..., Path]) -> None:
    folder, token_ids = tiny_model(name), some_tokens(100)
    want = reference_logits(folder, token_ids, getattr(torch, dtype))
    assert torch.equal(prefill_logits(folder, token_ids, dtype=dtype), want)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_experts_in_half_precision_are_as_exact_as_those_of_transformers(
    name: str, dtype: str, tiny_model: Callable[..., Path]
) -> None:
    # The expert kernel rounds once, at its end; transformers rounds after each product. Neither is the other's
    # reference, so both are compared with float32. Several texts, as a router's near tie that falls the other way
    # changes some tokens by much.
    folder, theirs, ours = tiny_model(name), 0.0, 0.0
    for seed in range(3):
        token_ids = some_tokens(100, seed=seed)
        exact = reference_logits(folder, token_ids)
        theirs += (reference_logits(folder, token_ids, getattr(torch, dtype)) - exact).abs().mean().item()
        ours += (prefill_logits(folder, token_ids, dtype=dtype) - exact).abs().mean().item()
    assert ours <= 1.25 * theirs
