"""Writes into the proof how much memory the parts of a worker take, in its first step: weights and cache are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import psutil

from moe_optimizer.errors import described
from moe_optimizer.log import get_logger
from moe_optimizer.proof.record import MemoryProof
from moe_optimizer.vllm_plugin.session import PluginSession

if TYPE_CHECKING:
    import torch

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
    weights, cache = _bytes([*model.parameters(), *model.buffers()]), _bytes(_tensors(runner.kv_caches))
    return MemoryProof(
        weight_bytes=weights,
        kv_cache_bytes=cache,
        # vLLM measures it on GPUs, with an estimate for its graphs.
        activation_bytes=None if activations is None else int(activations),
        workspace_bytes=_workspace_bytes(next(model.parameters()).device, weights + cache),
    )


def _workspace_bytes(device: torch.device, held: int) -> int | None:
    """Return the bytes of runtime, communication and graphs on a GPU; on a CPU those of the process without `held`."""
    if device.type == "cpu":
        # Never below what the tensors take: a page that nothing has touched yet is not there.
        return max(0, psutil.Process().memory_info().rss - held)
    if device.type != "cuda":
        return None
    import torch  # not at the top: the doctor, and the help of all commands, read this module's neighbours

    free, total = torch.cuda.mem_get_info(device)
    own_pool = (0, 0)
    graphs = sum(
        each["total_size"] for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) != own_pool
    )
    return total - free - torch.cuda.memory_reserved(device) + graphs


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
