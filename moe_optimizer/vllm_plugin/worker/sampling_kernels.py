"""Compiles the kernels of vLLM's sampler for top_k and top_p in threads, while the model is compiled and captured.

vLLM before 0.32 compiles each of them when a step first needs it, one after the other, and a request waits.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from moe_optimizer.errors import described
from moe_optimizer.log import get_logger, timed

_MODULE = "vllm.v1.sample.ops.topk_topp_triton"
_KERNEL = "_topk_topp_kernel"
_VLLMS_OWN = "vllm.model_executor.warmup.jit_warmup"
"""vLLM 0.32 and later have it: there vLLM itself compiles them at its start."""
_BATCHES = (9, 16)
"""Triton compiles apart for numbers that divide by 16. vLLM takes this kernel from eight requests on."""

Launch = tuple[tuple[Any, ...], dict[str, Any]]

logger = get_logger(__name__)


def compile_sampling_kernels(worker: Any) -> threading.Thread | None:
    """Begin to compile them for a worker whose model is loaded; return the thread that does.

    Nothing is launched, allocated or loaded on the GPU, so graphs can be captured meanwhile. What vLLM does with the
    compiled kernels does not change: without them it compiles, as before.

    Returns:
        None where vLLM does it by itself, or here it cannot be done; the log says why.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or importlib.util.find_spec(_VLLMS_OWN) is not None:
        return None
    try:
        module = importlib.import_module(_MODULE)
        launches = launches_of(module, worker.vllm_config.model_config.get_vocab_size())
    except Exception as error:  # noqa: BLE001 - vLLM is starting, and does not need it
        logger.warning("the sampler's kernels are compiled when requests need them: %s", described(error))
        return None
    thread = threading.Thread(
        target=_compile,
        args=(getattr(module, _KERNEL), launches, worker.device),
        name="moe-optimizer-sampling",
        daemon=True,
    )
    thread.start()
    return thread


def launches_of(module: ModuleType, vocab_size: int) -> list[Launch]:
    """Return the arguments with which vLLM launches the kernel: top_k, top_p and both, in batches of both kinds.

    vLLM's own function says them, of tensors without memory.
    """
    import torch

    with _recorded(module) as launches:
        for batch in _BATCHES:
            logits = torch.empty(batch, vocab_size, dtype=torch.float32, device="meta")
            k = torch.empty(batch, dtype=torch.int32, device="meta")
            p = torch.empty(batch, dtype=torch.float32, device="meta")
            for asked in ((k, None), (None, p), (k, p)):
                module.apply_top_k_top_p_triton(logits, *asked)
    return launches


@contextlib.contextmanager
def _recorded(module: ModuleType) -> Iterator[list[Launch]]:
    """Have launches of the kernel noted instead, while the block lasts; no other thread computes yet."""
    launches: list[Launch] = []

    class Recorder:
        def __getitem__(self, grid: object) -> Any:
            return lambda *args, **kwargs: launches.append((args, kwargs))

    kernel = getattr(module, _KERNEL)
    setattr(module, _KERNEL, Recorder())
    try:
        yield launches
    finally:
        setattr(module, _KERNEL, kernel)


def _compile(kernel: Any, launches: list[Launch], device: Any) -> None:
    """Compile all at once; the kernel has them in memory then, under the keys of real launches."""
    try:
        import torch
        import triton

        # A thread begins at the first GPU, and Triton keeps kernels by GPU.
        torch.accelerator.set_device_index(device)
        with (
            timed(logger, "kernels of the sampler"),
            ThreadPoolExecutor(len(launches)) as executor,
            triton.AsyncCompileMode(executor),
        ):
            for args, kwargs in launches:
                kernel.warmup(*args, grid=(1,), **kwargs)
    except Exception as error:  # noqa: BLE001 - vLLM is starting, and does not need it
        logger.warning("the sampler's kernels are compiled when requests need them: %s", described(error))
