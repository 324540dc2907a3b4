"""How much of an FP8 cache is cut off: counted from samples of what earlier steps wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optimizer.proof.record import CacheSaturation
from moe_optimizer.vllm_plugin.session import PluginSession
from moe_optimizer.vllm_plugin.worker import cache_saturation
from moe_optimizer.vllm_plugin.worker.cache_saturation import count_saturated, sample_cache, watch_cache
from tests.builders import cpu_machine, made_plan, tiny_moe

BLOCKS, BLOCK = 5, 6
NOTHING = SimpleNamespace(scheduled_new_reqs=[])


def prompt(*blocks: int) -> Any:
    return SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(block_ids=(list(blocks),))])


class Cache:
    """A worker with a cache of two layers, keys and values [2, blocks, block]."""

    def __init__(self, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        self.layers = [torch.zeros(2, BLOCKS, BLOCK, dtype=dtype) for _ in range(2)]
        config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=BLOCKS))
        runner = SimpleNamespace(kv_caches=self.layers)
        self.wrapper = SimpleNamespace(worker=SimpleNamespace(model_runner=runner, vllm_config=config))

    def write(self, layer: int, block: int, *values: float) -> None:
        numbers = torch.tensor(values).clamp(-448, 448).to(self.layers[layer].dtype)
        self.layers[layer].view(torch.uint8)[0, block, : len(values)] = numbers.view(torch.uint8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def session(tmp_path: Path, clock: list[float]) -> Iterator[PluginSession]:
    started = PluginSession(run_dir=tmp_path, plan=made_plan(tiny_moe(), cpu_machine()))
    yield started
    watch_cache(started, "auto")  # nothing is looked at any more


@pytest.mark.parametrize(
    ("dtype", "largest", "bits"), [(torch.float8_e4m3fn, 448.0, 0x7E), (torch.float8_e5m2, 57344.0, 0x7B)]
)
def test_saturated_are_the_numbers_at_the_largest_of_either_sign_and_zeros_do_not_count(
    dtype: torch.dtype, largest: float, bits: int
) -> None:
    stored = torch.tensor([largest, -largest, 0.0, 1.0, -2.0, largest / 2]).to(dtype).view(torch.uint8)
    assert count_saturated(stored, bits).tolist() == [5, 2]


def test_only_blocks_of_the_latest_prompt_are_looked_at_one_layer_at_a_time(
    session: PluginSession, clock: list[float]
) -> None:
    cache = Cache()
    watch_cache(session, "fp8")
    sample_cache(cache.wrapper, prompt(1, 3))
    cache.write(0, 1, 1.0, 1000.0)
    cache.write(0, 3, -1000.0)
    cache.write(0, 2, 1000.0)  # another prompt's
    cache.write(1, 1, 2.0)
    for _ in range(3):
        clock[0] += 10
        sample_cache(cache.wrapper, NOTHING)
    # The third sample is read with the fourth.
    assert session.proof.cache_saturation == CacheSaturation(values=3 + 1, saturated=2)


def test_between_two_samples_steps_do_nothing(session: PluginSession, clock: list[float]) -> None:
    cache = Cache()
    watch_cache(session, "fp8")
    sample_cache(cache.wrapper, prompt(1))
    cache.write(0, 1, 1.0)
    clock[0] += 10
    for _ in range(100):
        sample_cache(cache.wrapper, NOTHING)
    assert session.proof.cache_saturation == CacheSaturation()
    clock[0] += 10
    sample_cache(cache.wrapper, NOTHING)
    assert session.proof.cache_saturation == CacheSaturation(values=1, saturated=0)


def test_a_cache_in_another_dtype_is_not_looked_at(session: PluginSession) -> None:
    watch_cache(session, "auto")
    sample_cache(None, None)
    assert session.proof.cache_saturation is None


def test_a_failure_ends_the_looking_and_not_the_worker(session: PluginSession, clock: list[float]) -> None:
    watch_cache(session, "fp8_e4m3")
    sample_cache(None, prompt(1))
    clock[0] += 10
    sample_cache(None, NOTHING)
    assert cache_saturation._sampler is None
