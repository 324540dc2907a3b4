"""`Sequence`: the tokens of one sample. `SequenceGroup`: the samples of one request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from moe_optimizer.engine.block import BlockTable
from moe_optimizer.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Generator

    from moe_optimizer.engine.detokenizer import Detokenizer
    from moe_optimizer.engine.outputs import Logprob


class Status(Enum):
    """Where a sequence is."""

    WAITING = auto()
    """For a seat in the batch; it holds no blocks."""
    RUNNING = auto()
    SWAPPED = auto()
    """Its blocks are in host memory."""
    FINISHED = auto()


class Sequence:
    """One sample: the prompt, what was generated, and where its keys and values are.

    Tokens [0, num_computed_tokens) are in the KV cache, [num_computed_tokens, num_tokens) are to be computed.
    """

    __slots__ = (
        "block_table",
        "cumulative_logprob",
        "detokenizer",
        "finish_reason",
        "generator",
        "group",
        "index",
        "logprobs",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_reported",
        "num_tokens",
        "order",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, group: SequenceGroup, index: int) -> None:
        self.group = group
        self.index = index
        self.token_ids = list(group.prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_reported = 0
        """Output tokens that a streaming client has."""
        self.block_table = BlockTable()
        self.order = (group.priority, group.arrival, index)
        """Earlier ones are served first and preempted last."""
        self.status = Status.WAITING
        self.cumulative_logprob = 0.0
        self.logprobs: list[dict[int, Logprob]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.detokenizer: Detokenizer | None = None
        self.generator: Generator | None = None

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        self.token_ids.append(token_id)
        self.num_tokens += 1

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.group.params

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.status is Status.FINISHED


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One request and its samples. The first sample computes the prompt; the others are forked from it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    """Lower is served first."""
    arrival: int = 0
    """Count of requests before it."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end a sample."""
    arrival_time: float = field(default_factory=time.monotonic)
    first_token_time: float | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values another request had left behind."""
    sequences: list[Sequence] = field(init=False)
    forked: bool = field(init=False)
    """Whether the samples behind the first have been given to the scheduler."""

    def __post_init__(self) -> None:
        self.sequences = [Sequence(self, index) for index in range(self.params.num_samples)]
        self.forked = len(self.sequences) == 1

    @property
    def finished(self) -> bool:
        """Whether every sample is."""
        return all(sequence.finished for sequence in self.sequences)
