"""Writes into the proof how much memory the parts of a worker take, in its first step: weights and cache are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from moe_optimizer.errors import described
from moe_optimizer.log import get_logger
from moe_optimizer.proof.record import MemoryProof
from moe_optimizer.vllm_plugin.session import PluginSession

logger = get_logger(__name__)
_awaited: PluginSession | None = None


def await_memory(session: PluginSession) -> None:
    """Have the next step of this process look at the worker's memory."""
    global _awaited  # noqa: PLW0603 - one model per process
    _awaited = session


def prove_memory(wrapper: Any) -> None:
    """Write what the parts take. Called before every step; from the second on it does nothing.

    Args:
        wrapper: vLLM's WorkerWrapperBase.
    """
    global _awaited
    if _awaited is None:
        return
    session, _awaited = _awaited, None
    try:
        session.proof.memory = memory_of(wrapper.worker)
    except Exception as error:  # noqa: BLE001 - vLLM is serving
        logger.warning("memory of the worker is not told: %s", described(error))
    session.writer.touch()


def memory_of(worker: Any) -> MemoryProof:
    """Return the bytes of a worker's parts."""
    runner = worker.model_runner
    model = runner.get_model()
    activations = getattr(worker, "peak_activation_memory", None)
    return MemoryProof(
        weight_bytes=_bytes([*model.parameters(), *model.buffers()]),
        kv_cache_bytes=_bytes(_tensors(runner.kv_caches)),
        # vLLM measures it on GPUs, with an estimate for its graphs.
        activation_bytes=None if activations is None else int(activations),
    )


def _tensors(found: Any) -> Iterator[Any]:
    """Yield the tensors of a cache, which some layers keep in lists."""
    for each in found:
        if isinstance(each, list | tuple):
            yield from _tensors(each)
        else:
            yield each


def _bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors; what several of them share is counted once."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())
