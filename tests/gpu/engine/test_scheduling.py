"""Asynchronous scheduling, preemption, samples, prefix cache and cache size on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_optimizer.engine import SamplingParams
from tests.gpu.engine.random_models import CONFIG, OUTPUTS, generate, prompts

pytestmark = pytest.mark.gpu
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": {"temperature": 0.8, "seed": 5, "n": 2},
    "filters": {"temperature": 0.9, "seed": 6, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "min_tokens": 3},
    "stop tokens": {"stop_token_ids": list(range(0, 509, 9))},
    "log-probabilities": {"logprobs": 3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_asynchronous_scheduling_gives_the_tokens_of_the_host_that_waits(kind: str, make_engine: Any) -> None:
    several = prompts(24)
    want = generate(make_engine("dense", async_scheduling=False), several, **KINDS[kind])
    assert generate(make_engine("dense"), several, **KINDS[kind]) == want
    # Chunks, preemption and swapping, with a token under way.
    tight = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 48, "swap_space": 0.05, "enforce_eager": True}
    assert generate(make_engine("dense", **tight), several, **KINDS[kind]) == want


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_launches_a_step_without_waiting_for_the_gpu(kind: str, make_engine: Any) -> None:
    engine = make_engine("dense")
    arguments: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": OUTPUTS, **KINDS[kind]}
    for number, prompt in enumerate(prompts(8)):
        engine.add_request(str(number), prompt, SamplingParams(**arguments))
    for _ in range(4):
        engine.step()
    step = engine.scheduler.schedule()
    assert step.decodes
    torch.cuda.synchronize()
    # Half a second on an H100, in which the GPU does nothing else.
    torch.cuda._sleep(1_000_000_000)
    busy = torch.cuda.current_stream().record_event()
    tokens = engine.executor.launch(step)
    assert not busy.query()
    token_ids, _ = tokens.read()
    assert busy.query()
    assert len(token_ids) == len(step.decodes)


@pytest.mark.parametrize(
    "switch", [{"gpu_sampler": False}, {"kv_cache": False, "async_scheduling": False}, {"continuous_batching": False}]
)
def test_what_slows_a_gpu_down_changes_no_output(switch: dict[str, Any], make_engine: Any) -> None:
    several = prompts(12)
    assert generate(make_engine("dense", **switch), several) == generate(make_engine("dense"), several)


@pytest.mark.parametrize("swap_space", [0.0, 0.05])
def test_a_full_cache_changes_no_output(swap_space: float, make_engine: Any) -> None:
    several = prompts(12)
    want = generate(make_engine("dense"), several)
    tight = make_engine("dense", num_gpu_blocks_override=40, swap_space=swap_space, enable_prefix_caching=False)
    assert generate(tight, several) == want
    assert tight.scheduler.num_preemptions > 0


def test_samples_of_a_seed_are_the_same_in_every_batch(make_engine: Any) -> None:
    several = prompts(6)
    drawn = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 5, "n": 2}
    together = generate(make_engine("dense"), several, **drawn)
    alone = [generate(make_engine("dense"), [prompt], **drawn)[0] for prompt in several[:2]]
    assert together[:2] == alone
    assert together[0][0] != together[0][1]


def test_a_shared_beginning_is_found_again(make_engine: Any) -> None:
    engine, head = make_engine("dense"), prompts(1)[0] * 3
    first = generate(engine, [[*head, 1]])
    engine.add_request("again", [*head, 1], SamplingParams(temperature=0, max_tokens=OUTPUTS, detokenize=False))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].num_cached_tokens >= len(head) // 16 * 16 - 16
    assert [outputs[-1].outputs[0].token_ids] == first[0]


def test_the_cache_leaves_the_memory_that_was_not_given(make_engine: Any) -> None:
    torch.cuda.empty_cache()
    engine = make_engine("dense", num_gpu_blocks_override=None, gpu_memory_utilization=0.4, max_num_seqs=4)
    generate(engine, prompts(4))
    free, total = torch.cuda.mem_get_info()
    assert free >= 0.55 * total
    assert engine.executor.cache_size.num_blocks == 4 * CONFIG["max_position_embeddings"] // 16
