"""Says what to lower when the memory is used up."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe_optimizer.errors import DoesNotFitError

_SAID = ("can't allocate memory", "MPS backend out of memory")


@contextmanager
def out_of_memory_explained() -> Iterator[None]:
    """Raise torch's errors of this kind, on a GPU or the host, as a DoesNotFitError."""
    try:
        yield
    except RuntimeError as error:
        # Only CUDA has a class for it.
        if not isinstance(error, torch.OutOfMemoryError) and not any(said in str(error) for said in _SAID):
            raise
        raise DoesNotFitError(
            f"out of memory: {str(error).splitlines()[0]}",
            hint="lower max_num_seqs, max_num_batched_tokens or gpu_memory_utilization",
        ) from error
