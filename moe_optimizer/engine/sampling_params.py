"""`SamplingParams`: how the tokens of one request are chosen and when they end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from moe_optimizer.errors import InputError

MAX_N = 64
"""Chosen: samples of one request. Each takes a seat in the batch."""
MAX_LOGPROBS = 100
"""Chosen: alternatives reported per token."""


class RequestOutputKind(Enum):
    """How much of a request each of its outputs repeats."""

    CUMULATIVE = "cumulative"
    """Everything so far, in every output."""
    DELTA = "delta"
    """Only what is new since the output before."""
    FINAL_ONLY = "final_only"
    """One output, when the request has finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The arguments are named as vLLM names them; `temperature_schedule` is ours.

    Raises:
        InputError: a value is outside its range. An unknown argument is a TypeError, as for any function.
    """

    n: int = 1
    """Samples returned."""
    best_of: int | None = None
    """Samples drawn, of which the `n` with the highest mean log-probability are returned; None draws `n`."""
    temperature: float = 1.0
    """0 is greedy: always the most likely token."""
    temperature_schedule: tuple[tuple[int, float], ...] = ()
    """(number of output tokens, temperature) in ascending order: the temperature from that token on."""
    top_k: int = 0
    """Only the k most likely tokens; 0 or -1 is all."""
    top_p: float = 1.0
    """Only the fewest most likely tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Only tokens at least this likely relative to the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time the token is in the output."""
    seed: int | None = None
    """Makes the request's samples the same in every batch; sample i uses seed + i."""
    max_tokens: int | None = 16
    """None is as many as fit the context."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; one string, or several."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Log-probabilities of the sampled token and of this many most likely ones; None reports none."""
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "temperature_schedule", tuple(tuple(pair) for pair in self.temperature_schedule))
        self._check_counts()
        self._check_numbers()
        self._check_stops()
        self._check_schedule()

    @property
    def num_samples(self) -> int:
        """Sequences that the request is computed with."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature == 0 and not self.temperature_schedule

    @property
    def penalized(self) -> bool:
        """Whether tokens seen before change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def temperature_at(self, num_output_tokens: int) -> float:
        """Return the temperature of the token after `num_output_tokens`."""
        reached = [value for start, value in self.temperature_schedule if start <= num_output_tokens]
        return reached[-1] if reached else self.temperature

    def _check_counts(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_N)
            if self.best_of != self.n and self.output_kind is RequestOutputKind.DELTA:
                raise InputError("best_of: got more samples than n while streaming, expected n or None")
        _integer("top_k", self.top_k, -1, None)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
            if self.min_tokens > self.max_tokens:
                raise InputError(f"min_tokens: got {self.min_tokens}, expected at most max_tokens ({self.max_tokens})")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, 0, 100)
        _number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise InputError("top_p: got 0, expected above 0 and at most 1", hint="for greedy set temperature to 0")
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0, 100)
        if self.repetition_penalty == 0:
            raise InputError("repetition_penalty: got 0, expected above 0")
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)

    def _check_stops(self) -> None:
        if not all(isinstance(text, str) and text for text in self.stop):
            raise InputError(f"stop: got {list(self.stop)!r}, expected strings that are not empty")
        if self.stop and not self.detokenize:
            raise InputError("stop: got strings with detokenize=False, expected detokenize=True")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, None)

    def _check_schedule(self) -> None:
        starts = []
        for pair in self.temperature_schedule:
            if len(pair) != 2:
                raise InputError(f"temperature_schedule: got {pair!r}, expected (number of tokens, temperature)")
            _integer("temperature_schedule", pair[0], 0, None)
            _number("temperature_schedule", pair[1], 0, 100)
            starts.append(pair[0])
        if starts != sorted(set(starts)):
            raise InputError(f"temperature_schedule: got token counts {starts}, expected ascending ones")


def one_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts.

    Raises:
        InputError: as many as prompts were expected, and another number was given.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    if len(params) != count:
        raise InputError(f"sampling_params: got {len(params)}, expected one, or as many as prompts ({count})")
    return list(params)


def _integer(name: str, value: Any, lowest: int, highest: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name}: got {value!r}, expected an integer")
    if value < lowest or (highest is not None and value > highest):
        upto = f"at least {lowest}" if highest is None else f"{lowest} to {highest}"
        raise InputError(f"{name}: got {value}, expected {upto}")


def _number(name: str, value: Any, lowest: float, highest: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"{name}: got {value!r}, expected a finite number")
    if not lowest <= value <= highest:
        raise InputError(f"{name}: got {value}, expected {lowest:g} to {highest:g}")
