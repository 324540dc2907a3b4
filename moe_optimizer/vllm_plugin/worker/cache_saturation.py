"""Counts how much of what serving writes into an FP8 cache is cut off at the largest number that FP8 has.

Of everything that is quantized while serving, only that can be: kernels that quantize activations, ours and vLLM's,
scale each token so that its largest value is the largest number, but keys and values are stored under one scale that
is fixed before the first request. Every few seconds one layer's part of a few blocks is looked at, which a step does
not notice; on a GPU nobody waits for the result.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from moe_optimizer.errors import described
from moe_optimizer.log import get_logger
from moe_optimizer.proof.record import CacheSaturation
from moe_optimizer.vllm_plugin.session import PluginSession

if TYPE_CHECKING:
    import torch

_LARGEST = {"fp8": 0x7E, "fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B}
"""vLLM's name of a cache's dtype -> bits of the largest finite number, without the sign."""
_MAGNITUDE = 0x7F
_INTERVAL_S = 5.0
"""Chosen: between two samples."""
_BLOCKS = 8
"""Chosen: of one sample; those of the latest prompt."""

logger = get_logger(__name__)
_sampler: _Sampler | None = None


def watch_cache(session: PluginSession, cache_dtype: str) -> None:
    """Look at the cache from now on, if it is one in FP8."""
    global _sampler  # noqa: PLW0603 - one model per process
    largest = _LARGEST.get(cache_dtype)
    _sampler = None if largest is None else _Sampler(session, largest)


def sample_cache(wrapper: Any, scheduler_output: Any) -> None:
    """Look at the cache if it is time to. Called before every step; a failure ends the looking, not the worker.

    Args:
        wrapper: vLLM's WorkerWrapperBase.
        scheduler_output: of the step.
    """
    global _sampler  # noqa: PLW0603
    if _sampler is None:
        return
    try:
        _sampler.step(wrapper, scheduler_output)
    except Exception as error:  # noqa: BLE001 - vLLM is serving
        _sampler = None
        logger.warning("saturation of the cache is not counted: %s", described(error))


class _Sampler:
    def __init__(self, session: PluginSession, largest: int) -> None:
        self._session, self._largest = session, largest
        self._found = CacheSaturation()
        self._blocks: list[int] = []
        self._next_s = time.monotonic() + _INTERVAL_S
        self._counts: torch.Tensor | None = None
        self._layer = itertools.count()
        session.proof.cache_saturation = self._found

    def step(self, wrapper: Any, scheduler_output: Any) -> None:
        # What an earlier step has written: the blocks of a prompt that comes in this one are still empty.
        if self._blocks and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _INTERVAL_S
            self._sample(wrapper.worker)
        if new := scheduler_output.scheduled_new_reqs:
            self._blocks = list(new[-1].block_ids[0][:_BLOCKS])

    def _sample(self, worker: Any) -> None:
        import torch  # not at the top: the doctor, and the help of all commands, read this module's neighbours

        self._read_earlier()
        caches = [each for each in worker.model_runner.kv_caches if isinstance(each, torch.Tensor)]
        cache = caches[next(self._layer) % len(caches)]
        num_blocks = worker.vllm_config.cache_config.num_gpu_blocks
        if cache.element_size() != 1 or num_blocks not in cache.shape:
            return
        dimension, stored = cache.shape.index(num_blocks), cache.view(torch.uint8)
        # No tensor of their numbers: to bring one to a GPU would wait for the steps that it still has to do.
        sample = torch.cat([stored.narrow(dimension, block, 1) for block in self._blocks])
        # Read at the next sample, when it has long been there.
        self._counts = count_saturated(sample, self._largest).to("cpu", non_blocking=True)

    def _read_earlier(self) -> None:
        if self._counts is not None:
            written, saturated = self._counts.tolist()
            self._found.values += written
            self._found.saturated += saturated
            self._counts = None
            self._session.writer.touch()


def count_saturated(stored: torch.Tensor, largest: int) -> torch.Tensor:
    """Return how many numbers of a cache are not zero, and how many of these are the largest there is.

    Args:
        stored: uint8, any shape: the bits of FP8 numbers. What nothing was written to is zero.
        largest: bits of the largest finite number.

    Returns:
        int64 [2], on the device of `stored`.
    """
    import torch

    magnitudes = stored & _MAGNITUDE
    return torch.stack([torch.count_nonzero(magnitudes), torch.count_nonzero(magnitudes == largest)])
