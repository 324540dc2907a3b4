"""`Sequence`: the tokens of one sample. `SequenceGroup`: the samples of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from moe_optimizer.engine.block import BlockTable
from moe_optimizer.engine.sampling_params import SamplingParams


class Status(Enum):
    """Whether a sequence has a seat in the batch. One that is finished may have its last token under way."""

    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    """It waits with its blocks in host memory; others that wait have none."""
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample: the prompt, what was generated, and where its keys and values are.

    Tokens [0, num_computed_tokens) are in the KV cache as soon as the device has done what it was given; tokens
    [num_computed_tokens, num_tokens) are to be computed.
    """

    group: SequenceGroup
    index: int
    """Among the group's samples."""
    token_ids: list[int]
    """Those that the host knows."""
    num_tokens: int
    """With the one that a step under way samples."""
    order: tuple[int, int, int]
    """Earlier ones are served first and preempted last."""
    row: int = 0
    """Its place among the sequences of the step that samples or sampled its last token."""
    num_computed_tokens: int = 0
    block_table: BlockTable = field(default_factory=BlockTable)
    num_slots: int = 0
    """Tokens that it may hold before the block manager has to be asked for room."""
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float = 0.0
    logprobs: list[Any] = field(default_factory=list)
    num_reported: int = 0
    """Output tokens that a streaming client has."""
    detokenizer: Any = None
    generator: Any = None
    """Of random numbers, where the request has a seed."""

    @property
    def params(self) -> SamplingParams:
        return self.group.params

    @property
    def num_output_tokens(self) -> int:
        """With the one that a step under way samples."""
        return self.num_tokens - len(self.group.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.group.prompt_token_ids) :]

    @property
    def mean_logprob(self) -> float:
        return self.cumulative_logprob / max(1, len(self.output_token_ids))

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceGroup:
    """One request and its samples. The first sample computes the prompt; the others are forked from it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_num_tokens: int
    """Of a sample, its prompt included."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end a sample."""
    priority: int = 0
    """Lower is served first."""
    arrival: int = 0
    """Count of requests before it."""
    unread: bool = False
    """Whether an output waits for its reader: the next one is made when it has been taken, or at the end."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values another request had left behind."""
    sequences: list[Sequence] = field(init=False)
    forked: bool = field(init=False)
    """Whether the samples behind the first have been given to the scheduler."""

    def __post_init__(self) -> None:
        prompt, key = self.prompt_token_ids, (self.priority, self.arrival)
        indices = range(self.params.num_samples)
        self.sequences = [Sequence(self, index, list(prompt), len(prompt), (*key, index)) for index in indices]
        self.forked = len(indices) == 1

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)
