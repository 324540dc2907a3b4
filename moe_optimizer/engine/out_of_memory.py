"""Says what to lower when the memory is used up."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe_optimizer.errors import DoesNotFitError

_SAID = ("can't allocate memory", "MPS backend out of memory")


@contextmanager
def out_of_memory_explained() -> Iterator[None]:
    """Raise errors of this kind, on a GPU or the host, as a DoesNotFitError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # Torch has a class for CUDA's alone.
        if not (isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(each in str(error) for each in _SAID)):
            raise
        raise DoesNotFitError(
            "out of memory: " + str(error).partition("\n")[0],
            hint="lower max_num_seqs, max_num_batched_tokens, gpu_memory_utilization, a given KV cache or swap_space",
        ) from error
