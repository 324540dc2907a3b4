"""The parts of the engine that have nothing in common with the ones they replace; a scheduler or block manager is one
that inherits from `Scheduler` or `BlockManager`.
"""

from typing import Protocol

from torch import Tensor

from moe_optimizer.engine.kv_cache import CacheSize
from moe_optimizer.engine.outputs import SampledToken
from moe_optimizer.engine.scheduler_output import SchedulerOutput
from moe_optimizer.engine.sequence import Sequence


class Executor(Protocol):
    """Computes steps, and returns a token for each of `step.sampled`."""

    cache_size: CacheSize

    def execute(self, step: SchedulerOutput) -> list[SampledToken]: ...


class Sampler(Protocol):
    """Chooses a token for each row of logits [S, V], in the model's dtype, which it may overwrite."""

    def sample(self, logits_SV: Tensor, sequences: list[Sequence]) -> list[SampledToken]: ...
