"""Sampling: what is asked for is what is drawn."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optimizer.engine import LLM, SamplingParams
from moe_optimizer.engine.sampler import TorchSampler
from moe_optimizer.engine.sequence import Sequence, SequenceGroup
from moe_optimizer.errors import InputError

PROBABILITIES = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
PROMPT = "def add(a, b):\n"


def sequence(params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None) -> Sequence:
    each = SequenceGroup(
        request_id="0", prompt=None, prompt_token_ids=prompt or [0], params=params, max_num_tokens=100,
        end_token_ids=frozenset({0}),
    ).sequences[0]  # fmt: skip
    each.token_ids += output or []
    each.num_tokens = len(each.token_ids)
    return each


def draw(params: SamplingParams, *, count: int = 4000, output: list[int] | None = None) -> dict[int, float]:
    """How often each token is drawn."""
    sampler = TorchSampler(torch.device("cpu"), seed=1)
    sequences = [sequence(params, output=output) for _ in range(count)]
    logits = PROBABILITIES.log().repeat(count, 1)
    counts = Counter(sampler.sample(logits, sequences).read()[0])
    return {token: number / count for token, number in counts.items()}


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.7}, [0, 1]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_p": 0.01}, [0]),
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.8}, [0, 1]),
    ],
)
def test_tokens_are_drawn_in_proportion_from_those_that_are_left(values: dict[str, Any], kept: list[int]) -> None:
    shares = draw(SamplingParams(**values))
    total = sum(PROBABILITIES[kept].tolist())
    assert sorted(shares) == kept
    for token in kept:
        assert shares[token] == pytest.approx(PROBABILITIES[token].item() / total, abs=0.03)


# Vocabularies of several blocks: whole ones, one token more, most of the last block missing.
@pytest.mark.parametrize("vocab_size", [2048, 2049, 5000])
def test_tokens_of_all_blocks_are_drawn_in_proportion(vocab_size: int) -> None:
    probabilities = torch.zeros(vocab_size)
    places = torch.tensor([3, 1023, 1024, 2040, vocab_size - 1])
    probabilities[places] = PROBABILITIES
    sampler, count = TorchSampler(torch.device("cpu"), seed=1), 4000
    sequences = [sequence(SamplingParams())] * count
    tokens = Counter(sampler.sample(probabilities.log().repeat(count, 1), sequences).read()[0])
    assert sorted(tokens) == places.tolist()
    for place, probability in zip(places.tolist(), PROBABILITIES.tolist(), strict=True):
        assert tokens[place] / count == pytest.approx(probability, abs=0.03)


def test_a_greedy_row_beside_random_ones_takes_the_first_of_the_largest() -> None:
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    logits[:, 700] = logits[:, 2900] = logits.amax(-1)
    kinds = [SamplingParams(temperature=0), SamplingParams()] * 20
    tokens, _ = TorchSampler(torch.device("cpu"), seed=1).sample(logits, [sequence(each) for each in kinds]).read()
    assert tokens[::2] == logits.argmax(-1)[::2].tolist()


def test_temperature_flattens_and_sharpens() -> None:
    want = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    assert draw(SamplingParams(temperature=0.5))[0] == pytest.approx(want[0].item(), abs=0.03)
    assert draw(SamplingParams(temperature=0)) == {0: 1.0}


@pytest.mark.parametrize("values", [{}, {"top_k": 2}, {"temperature_schedule": [(0, 1e-45)]}], ids=str)
@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-10])
def test_a_temperature_near_zero_takes_the_most_likely_token(temperature: float, values: dict[str, Any]) -> None:
    params = SamplingParams(temperature=temperature, **values)
    logits = torch.tensor([[11.0, 13.0, 12.0]])
    assert TorchSampler(torch.device("cpu"), seed=1).sample(logits, [sequence(params)]).read()[0] == [1]


def test_a_schedule_changes_the_temperature_with_the_tokens() -> None:
    params = SamplingParams(temperature=0, temperature_schedule=[(2, 1.0)])
    assert draw(params, output=[1]) == {0: 1.0}
    assert len(draw(params, output=[1, 1])) == 5


@pytest.mark.parametrize(
    "values",
    [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.1}, {"presence_penalty": 1.3}, {"logprobs": 2}],
    ids=str,
)
def test_logits_in_half_precision_are_taken_as_the_numbers_they_are(values: dict[str, Any]) -> None:
    logits = 4 * torch.randn(64, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    arguments: dict[str, Any] = {"temperature": 0.7, "seed": 3, **values}
    params = SamplingParams(**arguments)
    tokens = [
        TorchSampler(torch.device("cpu"), seed=1)
        .sample(given.clone(), [sequence(params, output=[5]) for _ in logits])
        .read()
        for given in (logits, logits.float())
    ]
    assert tokens[0] == tokens[1]


def test_rows_of_different_kinds_do_not_disturb_each_other() -> None:
    sampler = TorchSampler(torch.device("cpu"), seed=1)
    kinds = [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(top_p=0.1), SamplingParams()]
    for _ in range(50):
        logits = PROBABILITIES.log().repeat(4, 1)
        token_ids, _ = sampler.sample(logits, [sequence(params) for params in kinds]).read()
        assert token_ids[:3] == [0, 0, 0]


def test_a_step_of_other_requests_is_drawn_as_they_ask() -> None:
    sampler = TorchSampler(torch.device("cpu"), seed=1)
    first, last = SamplingParams(temperature=0), SamplingParams(temperature=0, min_tokens=9)
    for params, want in (([first, last], [0, 1]), ([last, first], [1, 0]), ([last], [1]), ([first, first], [0, 0])):
        logits = PROBABILITIES.log().repeat(len(params), 1)
        # The end, token 0, is the likeliest.
        assert sampler.sample(logits, [sequence(each) for each in params]).read()[0] == want


def test_penalties_lower_what_was_seen() -> None:
    def logits_after(**values: Any) -> Tensor:
        logits = torch.tensor([[2.0, 1.0, -1.0, 0.5]])
        sampler = TorchSampler(torch.device("cpu"), seed=0)
        sampler.sample(logits, [sequence(SamplingParams(temperature=0, **values), [0], [1, 1, 2])])
        return logits[0]

    assert logits_after(repetition_penalty=2.0).tolist() == [1.0, 0.5, -2.0, 0.5]
    assert logits_after(presence_penalty=0.5).tolist() == [2.0, 0.5, -1.5, 0.5]
    assert logits_after(frequency_penalty=0.5).tolist() == [2.0, 0.0, -1.5, 0.5]


def test_logprobs_are_those_before_temperature_and_filters() -> None:
    sampler = TorchSampler(torch.device("cpu"), seed=0)
    params = SamplingParams(temperature=0.1, top_k=1, logprobs=2)
    shown = sampler.sample(PROBABILITIES.log()[None], [sequence(params)]).read()[1][0]
    assert shown is not None
    assert {each: round(torch.tensor(value.logprob).exp().item(), 4) for each, value in shown.items()} == {
        0: 0.4,
        1: 0.3,
    }
    assert [value.rank for value in shown.values()] == [1, 2]


def test_no_end_before_min_tokens() -> None:
    sampler = TorchSampler(torch.device("cpu"), seed=0)
    params = SamplingParams(temperature=0, min_tokens=2)
    for output, want in (([], 1), ([1], 1), ([1, 1], 0)):
        token_ids, _ = sampler.sample(PROBABILITIES.log()[None].clone(), [sequence(params, output=output)]).read()
        assert token_ids == [want]


@pytest.mark.parametrize(
    "values",
    [
        {"n": 0}, {"n": 2, "best_of": 1}, {"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0.0},
        {"top_p": 1.1}, {"top_k": -2}, {"min_p": 2.0}, {"max_tokens": 0}, {"min_tokens": 20}, {"stop": [""]},
        {"stop": ["x"], "detokenize": False}, {"logprobs": -1}, {"repetition_penalty": 0.0}, {"presence_penalty": 3.0},
        {"seed": 2**64}, {"temperature_schedule": [(5, 1.0), (2, 1.0)]}, {"n": True}, {"temperature": "hot"},
        {"temprature": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_out_of_range_or_an_unknown_name_is_an_error(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(values))[:4]):
        SamplingParams(**values)


def test_a_seed_gives_the_same_samples_in_every_batch(tiny_moe_llm: LLM) -> None:
    params = SamplingParams(seed=7, max_tokens=16, n=2)
    alone = tiny_moe_llm.generate(PROMPT, params, use_tqdm=False)[0]
    beside = tiny_moe_llm.generate(["import os", PROMPT, "x ="], [SamplingParams(), params, SamplingParams()])[1]
    tokens = [sample.token_ids for sample in alone.outputs]
    assert tokens == [sample.token_ids for sample in beside.outputs]
    assert tokens[0] != tokens[1]


def test_best_of_returns_the_most_likely_samples(tiny_moe_llm: LLM) -> None:
    every = tiny_moe_llm.generate(PROMPT, SamplingParams(seed=3, n=4, logprobs=0), use_tqdm=False)[0].outputs
    best = tiny_moe_llm.generate(PROMPT, SamplingParams(seed=3, n=2, best_of=4), use_tqdm=False)[0].outputs
    likely = sorted(every, key=lambda sample: (sample.cumulative_logprob or 0) / -len(sample.token_ids))[:2]
    assert [sample.token_ids for sample in best] == [sample.token_ids for sample in likely]
    assert [sample.index for sample in best] == [0, 1]


@pytest.mark.parametrize("included", [True, False])
def test_a_stop_string_ends_the_text(tiny_moe_llm: LLM, included: bool) -> None:
    free = tiny_moe_llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)[0].outputs[0]
    stop = free.text[10:13]
    params = SamplingParams(temperature=0, max_tokens=30, stop=[stop], include_stop_str_in_output=included)
    sample = tiny_moe_llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    end = free.text.index(stop)
    assert sample.text == free.text[: end + (len(stop) if included else 0)]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)


def test_a_stop_string_before_min_tokens_is_part_of_the_text(tiny_moe_llm: LLM) -> None:
    free = tiny_moe_llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)[0].outputs[0]
    params = SamplingParams(temperature=0, max_tokens=30, min_tokens=30, stop=[free.text[10:13]])
    assert tiny_moe_llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text == free.text


def test_a_stop_token_ends_the_output(tiny_moe_llm: LLM) -> None:
    free = tiny_moe_llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)[0].outputs[0]
    token = free.token_ids[4]
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[token])
    sample = tiny_moe_llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert sample.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", token)
