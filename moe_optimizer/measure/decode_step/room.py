"""Chooses how long the sequences of a batch are: the cache has to hold all of them until the last counted step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from moe_optimizer.errors import UnsupportedError

SETTLING_STEPS = 8
"""Chosen: the first decode steps after a prompt still overlap with host work of the prompt."""
_SPARE = 0.2
"""Chosen: the share of the cache that is left free where the other side, which may have less, is asked for the same."""
_SHORTEST = 64
"""Chosen: a decode step over fewer tokens shows next to nothing of the attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What an engine can hold at once."""

    cache_tokens: int
    block_tokens: int
    """A sequence takes whole blocks of the cache."""
    sequences: int
    sequence_tokens: int
    """The longest sequence, answer included."""
    step_tokens: int

    def answer_tokens(self, batch: int, context: int, steps: int) -> int:
        """Return how many tokens each sequence has to be able to generate: the first ones decode while the prompts of
        the last ones still run, and what settles and is counted comes after. `steps` are counted twice.
        """
        prompt_steps = math.ceil(batch * context / max(1, self.step_tokens - batch))
        return prompt_steps + 2 * steps + 2 * SETTLING_STEPS

    def context(self, batch: int, wanted: int, steps: int, *, shorter: bool) -> int:
        """Return how many tokens the sequences of a batch have when the counted steps begin.

        Args:
            batch: sequences decoded together.
            wanted: tokens.
            steps: counted steps.
            shorter: halve what does not fit, down to 64, and leave a fifth of the cache free: the other side, which
                gets the same context, may have less.

        Raises:
            UnsupportedError: they do not fit.
        """
        if batch > self.sequences:
            raise UnsupportedError(
                f"{batch} sequences: vLLM decodes at most {self.sequences} together here (--max-num-seqs)"
            )
        context, free = wanted, int(self.cache_tokens * (1 - _SPARE if shorter else 1))
        while not self._fits(batch, context, steps, free):
            if not shorter or context // 2 < _SHORTEST:
                needed = self._length(batch, context, steps)
                raise UnsupportedError(
                    f"{batch} sequences of {context} tokens do not decode together here: they need {needed:,} tokens "
                    f"each, of at most {self.sequence_tokens:,}, and {batch * needed:,} in all; "
                    f"the cache has {free:,} for them"
                )
            context //= 2
        return context

    def _length(self, batch: int, context: int, steps: int) -> int:
        return context + self.answer_tokens(batch, context, steps)

    def _fits(self, batch: int, context: int, steps: int, free: int) -> bool:
        length = self._length(batch, context, steps)
        blocks = math.ceil(length / self.block_tokens)
        return length <= self.sequence_tokens and batch * blocks * self.block_tokens <= free


def room_of(engine: Any) -> Room:
    """Return what one of vLLM's engines can hold, once it has made its cache."""
    config = engine.vllm_config
    cache, scheduler = config.cache_config, config.scheduler_config
    # Of a model with several kinds of layers the blocks alone do not tell; before 0.32 nothing else does.
    tokens = getattr(cache, "kv_cache_size_tokens", None) or (cache.num_gpu_blocks or 0) * cache.block_size
    return Room(
        cache_tokens=tokens,
        block_tokens=cache.block_size,
        sequences=scheduler.max_num_seqs,
        sequence_tokens=config.model_config.max_model_len,
        step_tokens=scheduler.max_num_batched_tokens,
    )
