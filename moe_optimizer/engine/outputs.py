"""`RequestOutput` and `CompletionOutput`: what a request gets back, named as vLLM names them."""

from dataclasses import dataclass
from typing import NamedTuple


class Logprob(NamedTuple):
    """Log-probability of one token at one place, before temperature, penalties and filters."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sample."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    """stop, length or abort; None while tokens come."""
    stop_reason: int | str | None = None
    """The stop string or token that ended it; None for an end-of-sequence token."""


@dataclass(slots=True)
class RequestOutput:
    """One request: its prompt and its samples, the best first if more were drawn than are returned."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
