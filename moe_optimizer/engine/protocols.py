"""The parts that a class of one's own can take the place of; a scheduler or block manager inherits from ours."""

from typing import Protocol

from torch import Tensor

from moe_optimizer.engine.kv_cache import CacheSize
from moe_optimizer.engine.sampled_tokens import SampledTokens
from moe_optimizer.engine.scheduler_output import SchedulerOutput
from moe_optimizer.engine.sequence import Sequence


class Executor(Protocol):
    """Computes steps, one after the other."""

    cache_size: CacheSize

    def launch(self, step: SchedulerOutput) -> SampledTokens:
        """Start to compute a step; return the tokens of `step.sampled`, which need not be there yet.

        With asynchronous scheduling a decode's last token may be one of the step before: `Sequence.row` of them.
        """
        ...


class Sampler(Protocol):
    """Chooses a token for each row of logits [S, V], in the model's dtype, which it may overwrite."""

    def sample(self, logits_SV: Tensor, sequences: list[Sequence]) -> SampledTokens: ...
