"""Counts how often vLLM's kernel reads an expert's weights in a step, where nobody tuned its tiles for the shape.

A block of threads multiplies a block of rows with a tile of the weights. Tuned tiles let blocks of rows of one expert
follow each other over the same tile of weights. vLLM's default does so only above `_UNGROUPED` tokens for each expert;
below, it goes through all of an expert for each block of rows. An expert that is larger than the GPU's L2 cache is then
read from memory once for each block.
"""

from __future__ import annotations

import math
import statistics

L2_BYTES = 50e6
"""Of H100 and H200, by their datasheets."""
_UNGROUPED = 128
"""Tokens of the step for each expert that a GPU holds."""
_FEW_TOKENS = ((32, 16), (96, 32), (512, 64))
"""Tokens of a step, at most -> rows of a block; read, as the rest, from the source of vLLM 0.26."""
_ROWS = 128


def reads_of_an_expert(tokens: float, num_experts: int, rows: float) -> float:
    """Return how often a step of `tokens` reads each of the `num_experts` of a GPU, which have `rows` each on average.

    It is the mean number of blocks that an expert's rows need; their number is taken to be normally distributed.
    """
    if tokens // num_experts > _UNGROUPED:
        return 1.0
    block = next((each for most, each in _FEW_TOKENS if tokens <= most), _ROWS)
    by_chance = statistics.NormalDist(rows, math.sqrt(max(rows, 1e-9) * max(1e-9, 1 - rows / tokens)))
    # An expert is read for a further block if it has more rows than the blocks before hold.
    return 1.0 + sum(1 - by_chance.cdf(full * block + 0.5) for full in range(1, math.ceil(tokens / block)))
