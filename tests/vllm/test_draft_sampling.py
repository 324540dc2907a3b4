"""Sampled answers have the model's distribution with drafts too, by the sampler of vLLM's CPU build."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from moe_optimizer.vllm_plugin.worker.draft_sampling import expanded

VOCABULARY, DRAFTS, REQUESTS = 12, 2, 20_000


@pytest.fixture(scope="module")
def workers_kernels() -> None:
    """As a worker of vLLM has them before it loads a model."""
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


@pytest.fixture
def patched(workers_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expanded)


def sampled(logits: torch.Tensor, drafts: torch.Tensor, **sampling: Any) -> torch.Tensor:
    """Return what vLLM's sampler answers where every request drafts alike.

    Args:
        logits: [DRAFTS + 1, VOCABULARY], after the answer so far and after each draft.
        drafts: [DRAFTS].
        sampling: of each request: temperature, top_k.

    Returns:
        [REQUESTS, DRAFTS + 1], -1 after the first draft that was not kept.
    """
    metadata = SpecDecodeMetadata.make_dummy([drafts.tolist()] * REQUESTS, device=torch.device("cpu"))
    rows = torch.arange(REQUESTS * (DRAFTS + 1), dtype=torch.int32).view(REQUESTS, -1)
    metadata.logits_indices = rows.flatten()
    metadata.target_logits_indices, metadata.bonus_logits_indices = rows[:, :-1].flatten(), rows[:, -1]
    temperature = torch.full((REQUESTS,), float(sampling["temperature"]))
    top_k = None if "top_k" not in sampling else torch.full((REQUESTS,), sampling["top_k"], dtype=torch.int32)
    settings = SamplingMetadata(
        temperature=temperature, all_greedy=False, all_random=True, top_p=None, top_k=top_k, generators={},
        max_num_logprobs=None, no_penalties=True, prompt_token_ids=None, frequency_penalties=torch.tensor([]),
        presence_penalties=torch.tensor([]), repetition_penalties=torch.tensor([]), output_token_ids=[],
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    flat = logits.repeat(REQUESTS, 1)
    return RejectionSampler(Sampler())(metadata, None, flat, settings).sampled_token_ids


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 0.8, "top_k": 3}])
@pytest.mark.usefixtures("patched")
def test_sampled_answers_with_drafts_have_the_models_distribution(sampling: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(DRAFTS + 1, VOCABULARY)
    drafts = torch.topk(logits[:DRAFTS], 2).indices[:, 1]  # the second best: kept now and then
    answers = sampled(logits, drafts, **sampling)
    kept = torch.ones(REQUESTS, dtype=torch.bool)
    for position in range(DRAFTS + 1):
        expected = distribution(logits[position], **sampling)
        counts = torch.bincount(answers[kept, position].long(), minlength=VOCABULARY)
        total = int(kept.sum())
        assert total > 400
        # Six standard deviations of a count.
        spread = 6 * torch.sqrt(total * expected * (1 - expected)) + 1
        assert ((counts - total * expected).abs() <= spread).all(), (position, counts / total, expected)
        kept &= answers[:, position] == (drafts[position] if position < DRAFTS else -1)


def distribution(logits: torch.Tensor, temperature: float, top_k: int | None = None) -> torch.Tensor:
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return torch.softmax(logits / temperature, dim=0)


def test_each_request_gives_its_value_to_its_drafts() -> None:
    values = torch.tensor([0.0, 0.5, 2.0])
    found = expanded(values, torch.tensor([2, 2, 5], dtype=torch.int32), 5, replace_from=0, replace_to=1)
    assert found.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    top_k = torch.tensor([7, 3], dtype=torch.int32)
    assert expanded(top_k, torch.tensor([1, 3]), 3).tolist() == [7, 3, 3]
    assert expanded(top_k, torch.tensor([1, 3]), 3).dtype == torch.int32
