"""`SamplingParams`: how the tokens of one request are chosen and when they end."""

from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from moe_optimizer.arguments import Arguments

MAX_N = 64
"""Chosen: samples of one request. Each takes a seat in the batch."""
MAX_LOGPROBS = 100
"""Chosen: alternatives reported per token."""

Temperature = Annotated[float, Field(ge=0, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0)]


class RequestOutputKind(Enum):
    """How much of a request each of its outputs repeats."""

    CUMULATIVE = "cumulative"
    """Everything so far, in every output."""
    DELTA = "delta"
    """Only what is new since the output before."""
    FINAL_ONLY = "final_only"
    """One output, when the request has finished."""


class SamplingParams(Arguments):
    """The arguments are named as vLLM names them; `temperature_schedule` is ours."""

    n: int = Field(default=1, ge=1, le=MAX_N)
    """Samples returned."""
    best_of: int | None = Field(default=None, ge=1, le=MAX_N)
    """Samples drawn, of which the `n` with the highest mean log-probability are returned; None draws `n`."""
    temperature: Temperature = 1.0
    """0 is greedy: always the most likely token."""
    temperature_schedule: list[tuple[TokenId, Temperature]] = Field(default_factory=list)
    """(number of output tokens, temperature) in ascending order: the temperature from that token on."""
    top_k: int = Field(default=0, ge=-1, lt=2**63)
    """Only the k most likely tokens; 0 or -1 is all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the fewest most likely tokens whose probabilities sum to at least this."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Only tokens at least this likely relative to the most likely one."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: Penalty = 0.0
    """Subtracted once for each time the token is in the output."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Makes the request's samples the same in every batch, up to rounding; sample i uses seed + i."""
    max_tokens: int | None = Field(default=16, ge=1)
    """None is as many as fit the context."""
    min_tokens: int = Field(default=0, ge=0)
    """No end-of-sequence or stop token, and no stop string, before this many."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end the output; one string, or several."""
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Log-probabilities of the sampled token and of this many most likely ones; None reports none."""
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    @field_validator("stop", "stop_token_ids", "temperature_schedule", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return [value] if value else []
        if not isinstance(value, (list, tuple)):
            return value
        return [tuple(each) if isinstance(each, list) else each for each in value]

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.num_samples < self.n:
            raise ValueError(f"best_of: got {self.best_of}, expected at least n ({self.n})")
        if self.num_samples > self.n and self.output_kind is RequestOutputKind.DELTA:
            raise ValueError("best_of: got more samples than n while streaming, expected n or None")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: got {self.min_tokens}, expected at most max_tokens ({self.max_tokens})")
        if self.stop and not self.detokenize:
            raise ValueError("stop: got strings with detokenize=False, expected detokenize=True")
        if any(later <= earlier for (earlier, _), (later, _) in pairwise(self.temperature_schedule)):
            raise ValueError(f"temperature_schedule: got {self.temperature_schedule}, expected ascending counts")
        return self

    @cached_property
    def num_samples(self) -> int:
        """Sequences that the request is computed with."""
        return self.n if self.best_of is None else self.best_of

    @cached_property
    def penalized(self) -> bool:
        """Whether tokens seen before change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def final_only(self) -> bool:
        """Whether there is no output before the last."""
        return self.output_kind is RequestOutputKind.FINAL_ONLY or self.num_samples > self.n

    def temperature_at(self, num_output_tokens: int) -> float:
        for start, temperature in reversed(self.temperature_schedule):
            if start <= num_output_tokens:
                return temperature
        return self.temperature
