"""Chooses how many tokens a step of a server has: of those tried, the most that leave room to the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moe_optimizer.costs.memory import MemoryRequest, cache_bytes

_FEWEST_TOKENS = 1024
_CACHE_SHARE = 1 / 8
"""Chosen: larger steps may take at most this share of the cache that the smallest step would leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """A chosen size, and why not the larger ones."""

    tokens: int
    beyond_ours: tuple[int, ...] = ()
    """Larger sizes whose experts our kernels would not compute."""
    cache_shares: Mapping[int, float] = field(default_factory=dict)
    """Larger sizes, and which share of the cache each would take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRule:
    """Which sizes the steps of a server may have, whatever its layout."""

    most: int = 0
    """The first that is tried; half of it is the next."""
    most_in_batches: int | None = None
    """The same where copies exchange tokens through buffers of a fixed size; None: they do not."""
    given: int | None = None
    """The number that the user's own argument says, or vLLM takes by itself; None: it is chosen."""
    asked: int | None = None
    """The number of the profile, if a step that only decodes has no more; None: it is chosen."""
    unread_prompt: int = 0
    """Tokens of the longest prompt where vLLM may not read it in parts."""

    def in_batches(self, request: MemoryRequest) -> bool:
        """Return whether the copies of a server exchange tokens through buffers of a fixed size."""
        return self.most_in_batches is not None and request.data_parallel_size > 1 and request.expert_parallel

    def choose(self, request: MemoryRequest, *, decoding: int, ours_up_to: int = 0) -> StepSize:
        """Return the size for a server.

        Args:
            request: its memory; the tokens of its step do not count.
            decoding: the most tokens of a step that only decodes.
            ours_up_to: the most tokens of which our kernels compute the experts; 0: they compute none.
        """
        if self.given is not None:
            return StepSize(tokens=self.given)
        least = max(decoding, self.unread_prompt)
        if self.asked is not None:
            return StepSize(tokens=max(self.asked, least))
        most = self.most_in_batches if self.in_batches(request) else self.most
        assert most, "no size to begin with"
        fewest = max(min(_FEWEST_TOKENS, most), least)
        tokens, beyond = most, []
        while tokens // 2 >= fewest and tokens // 2 <= ours_up_to < tokens:
            beyond.append(tokens)
            tokens //= 2
        leaves, shares = cache_bytes(replace(request, max_num_batched_tokens=fewest)), {}
        while tokens > fewest:
            left = cache_bytes(replace(request, max_num_batched_tokens=tokens))
            if leaves and left >= (1 - _CACHE_SHARE) * leaves:
                break
            shares[tokens] = 1 - left / leaves if leaves else 1.0
            tokens //= 2
        return StepSize(tokens=max(tokens, fewest), beyond_ours=tuple(beyond), cache_shares=shares)
