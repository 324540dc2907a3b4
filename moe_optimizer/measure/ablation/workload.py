"""Requests of random lengths with a fixed seed, and the memory that a process took at most."""

from __future__ import annotations

import random
import resource
from typing import NamedTuple


class Request(NamedTuple):
    """Prompt tokens, and the number of tokens to generate."""

    prompt: list[int]
    num_output: int


def random_requests(
    count: int, inputs: tuple[int, int], outputs: tuple[int, int], vocab_size: int, *, shared: int = 0
) -> list[Request]:
    """Return requests with lengths between the bounds, the first `shared` tokens of the prompts equal."""
    rng = random.Random(0)
    head = [rng.randrange(vocab_size) for _ in range(shared)]
    return [
        Request(head + [rng.randrange(vocab_size) for _ in range(rng.randint(*inputs))], rng.randint(*outputs))
        for _ in range(count)
    ]


def peak_bytes() -> int:
    """Return the most memory that was in use: of the GPU, or of this process where none of a GPU was."""
    import torch

    return torch.cuda.max_memory_allocated() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
