"""Compares what a server decodes with what it computes of the same tokens as a prompt, before it is ready.

A decode step goes through vLLM's CUDA graphs of the whole model; a prompt that is longer than the largest of these goes
through none, or through graphs of single layers for steps that read prompts. Kernels that are wrong in a graph, or at
few tokens, give a token another probability in the one than in the other. Random prompts are answered greedily at
several batch sizes, then prompt and answer so far come as a prompt of their own, with a `cache_salt`, so that nothing
of the first request is read from the prefix cache.

Both differ by rounding too. A difference counts above a tolerance that rounding of 2 % in every layer's experts stays
below (see `docs/passes/flash_dmoe.md`), and a finding needs three things: too many such differences, again with other
prompts, and the prompts agreeing with themselves when they are asked in another order.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import urllib.error
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_optimizer.errors import described
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.warm_up_requests import Prompts
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.pass_params import GraphCaptureParams, KvCacheParams, SchedulerParams
from moe_optimizer.plan.plan import Plan

DEFAULT_LIMIT_S = 30.0
"""Chosen: the bundled model takes 3 s on two CPU cores; sizes that do not fit are left out."""
_BATCHES = (1, 8, 32, 64)
"""Chosen: each is another graph and, with our kernels, another range of tokens."""
_PROMPT = 96
"""Chosen: tokens of a prompt beyond those of the largest graph of a decode step: more than the largest batch has."""
_LONGEST_GRAPH = 512
"""Of vLLM by default, where the plan does not say."""
_PLAIN, _QUANTISED = 0.5, 1.0
"""Chosen: tolerances of a log-probability. Where weights or cache are quantised, the kernels for few tokens and for
many may round differently."""
_OFF = 0.1
_LEAST_OFF = 3
"""Chosen: as many tokens must be off; single ones are where a model with experts flips from one to another."""
_COMPARED = 16
"""Chosen: tokens that are compared at least, at each batch size."""
_SETTLED = 4
"""Chosen: decode steps that all requests of a batch share before those that are compared."""
TOP = 5
"""Chosen: log-probabilities that are asked; vLLM gives 20 at most by default."""
FLAT = 0.2
"""Chosen: nats. Where the best `TOP` tokens lie closer together, as with dummy weights, nothing can be told."""
_NOT_A_NUMBER = "JSON compliant"
"""In vLLM's answer when it should give a log-probability that is not a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeQuestion:
    """What is asked of each server."""

    batches: tuple[int, ...]
    """Requests at once."""
    prompt_tokens: int
    """More than the largest graph of a decode step has."""
    step_tokens: int
    """Most tokens of a step."""
    tolerance: float
    why_not: str = ""
    """Why the server is not asked; "" where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFound:
    """What a server's answers say."""

    batches: tuple[int, ...] = ()
    """Sizes that were compared."""
    differences: tuple[float, ...] = ()
    """Of each compared token's log-probability; infinite where it was not a number."""
    tolerance: float = 0.0
    why_not: str = ""
    """Why nothing was compared, or not everything."""
    wrong: str = ""
    """What is wrong; "" where nothing is."""

    def in_words(self) -> str:
        """Return it as a line for the proof."""
        if self.wrong:
            return f"failed decode against prompt: {self.wrong}"
        if not self.differences:
            return f"not run decode against prompt: {self.why_not}"
        sizes = ", ".join(map(str, self.batches))
        off = sum(each > self.tolerance for each in self.differences)
        rest = f"; {self.why_not}" if self.why_not else ""
        return (
            f"passed decode against prompt: {len(self.differences)} tokens at {sizes} requests at once, {off} off by "
            f"more than {self.tolerance:g}, the largest {max(self.differences):.2g}{rest}"
        )


def decode_question(plan: Plan, max_model_len: int) -> DecodeQuestion:
    """Return what the servers of a plan are asked."""
    steps = plan.decision("scheduler").params_as(SchedulerParams)
    graphs = plan.decision("graph_capture")
    largest = 0
    if plan.num_gpus:
        params = graphs.params
        largest = params.max_capture_size if isinstance(params, GraphCaptureParams) else _LONGEST_GRAPH
        # Larger ones are of steps that read prompts.
        largest = min(largest, max(_LONGEST_GRAPH, steps.max_num_seqs))
    batches = tuple(dict.fromkeys(min(batch, steps.max_num_seqs) for batch in _BATCHES))
    longer = largest + _PROMPT
    answered = max(_tokens(longer, batch, steps.max_num_batched_tokens) for batch in batches)
    return DecodeQuestion(
        batches=batches,
        prompt_tokens=max(1, min(longer, max_model_len - answered)),
        step_tokens=steps.max_num_batched_tokens,
        tolerance=_QUANTISED if _quantised(plan) else _PLAIN,
        why_not=_why_not(plan),
    )


def _quantised(plan: Plan) -> bool:
    cache = plan.decision("kv_cache").params
    return (
        plan.model.quant_method is not None
        or any(plan.decision(name).status is Status.ON for name in ("fp8", "four_bit"))
        or (isinstance(cache, KvCacheParams) and cache.dtype.startswith("fp8"))
    )


def _why_not(plan: Plan) -> str:
    if plan.decision("disaggregation").status is Status.ON:
        return "prompts and answers are computed by different servers"
    mode = plan.serve_args.values.get("--logprobs-mode", "")
    return f"--logprobs-mode {mode} gives no log-probabilities" if mode.endswith("_logits") else ""


def check_decode(client: ServerClient, model: str, question: DecodeQuestion, *, limit_s: float) -> DecodeFound:
    """Ask one server at each batch size, as far as the time goes, and compare; nothing it answers is an exception.

    Args:
        client: of the server itself: a router would spread the requests.
        model: its name in requests.
        question: what is asked.
        limit_s: for everything; a batch size that would take longer is left out.
    """
    if question.why_not:
        return DecodeFound(why_not=question.why_not)
    begin, sizes, differences, why_not = time.monotonic(), [], [], ""
    asked = _Asked(client, model, question, begin + limit_s)
    for batch in question.batches:
        began = time.monotonic()
        try:
            if not sizes:
                asked.first()
            found = asked.trial(batch, seed=batch)
            if _too_many(found, question.tolerance):
                asked.more_time(limit_s)
                wrong = _confirmed(asked, batch, question.tolerance)
                if wrong:
                    return DecodeFound(
                        batches=(*sizes, batch), differences=(*differences, *found), tolerance=question.tolerance,
                        wrong=f"{batch} requests at once: {wrong}",
                    )  # fmt: skip
        except _NotAskedError as error:
            why_not = str(error)
            break
        except (LookupError, TypeError, ValueError) as error:
            why_not = f"the server's answer is not as known: {described(error)}"
            break
        sizes.append(batch)
        differences += found
        now = time.monotonic()
        # The next size is up to eight times as many tokens.
        if batch != question.batches[-1] and begin + limit_s - now < 4 * (now - began):
            why_not = f"no time for more than {batch}"
            break
    return DecodeFound(
        batches=tuple(sizes), differences=tuple(differences), tolerance=question.tolerance, why_not=why_not
    )


def _confirmed(asked: _Asked, batch: int, tolerance: float) -> str:
    """Return what is wrong if other prompts show it too and prompts agree with themselves; "" if not."""
    again = asked.trial(batch, seed=batch + 1000)
    if not _too_many(again, tolerance) or _too_many(asked.prompts_again(), tolerance):
        return ""
    off = sum(each > tolerance for each in again)
    return (
        f"{off} of {len(again)} tokens have another log-probability when they are decoded than in a prompt: off by "
        f"more than {tolerance:g}, in the middle by {statistics.median(again):.2g}"
    )


def _too_many(differences: Sequence[float], tolerance: float) -> bool:
    off = sum(each > tolerance for each in differences)
    return off >= max(_LEAST_OFF, _OFF * len(differences))


def _tokens(prompt_tokens: int, batch: int, step_tokens: int) -> int:
    """Return how many tokens each request of a batch is to answer, so that the last ones are decoded all together."""
    # The first requests decode already while the prompts of the last are read.
    return math.ceil(batch * prompt_tokens / step_tokens) + _SETTLED + _places(batch)


def _places(batch: int) -> int:
    """Return how many tokens of each answer are compared."""
    return math.ceil(_COMPARED / batch)


class _NotAskedError(Exception):
    """The server does not answer what is asked here, or nothing can be told from it."""


class _NotANumberError(Exception):
    """A log-probability is not a number."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A token that was decoded."""

    before: list[int]
    """Prompt and answer up to it."""
    token: int
    logprob: float


class _Asked:
    """What one server was asked."""

    def __init__(self, client: ServerClient, model: str, question: DecodeQuestion, deadline: float) -> None:
        self._client = client
        self._model = model
        self._question = question
        self._deadline = deadline
        self._salt = 0
        self._places: list[list[_Place]] = []
        """Of the last trial: one list for each place in the answers, with a token of every request."""
        self._in_prompts: list[list[float]] = []

    def more_time(self, seconds: float) -> None:
        """Let what looks wrong be looked at once more."""
        self._deadline += seconds

    def first(self) -> None:
        """Ask for one prompt alone, before anything is decoded: what is not a number later spoils the cache.

        Raises:
            _NotAskedError: the server refuses, or its answers tell nothing.
        """
        try:
            self._complete([Prompts(0).of(self._question.prompt_tokens)], 1)
        except _NotANumberError:
            raise _NotAskedError("the model's log-probabilities are not numbers, in prompts too") from None

    def trial(self, batch: int, *, seed: int) -> list[float]:
        """Decode a batch, ask for the same tokens in prompts; return the differences.

        Raises:
            _NotAskedError: the server refuses, or its answers tell nothing.
        """
        random = Prompts(seed)
        prompts = [random.of(self._question.prompt_tokens) for _ in range(batch)]
        length = _tokens(self._question.prompt_tokens, batch, self._question.step_tokens)
        self._places, self._in_prompts = [], []
        try:
            answers = self._complete(prompts, length)
            for index in range(length - _places(batch), length):
                self._places.append([_place(*pair, index) for pair in zip(prompts, answers, strict=True)])
            # One request for each: prompts of which one begins as another would share what the cache has of it.
            self._in_prompts = [self._read(places) for places in self._places]
        except _NotANumberError:
            self._places = []
            return [math.inf] * (batch * _places(batch))
        decoded = [place.logprob for places in self._places for place in places]
        return _differences(decoded, itertools.chain.from_iterable(self._in_prompts))

    def prompts_again(self) -> list[float]:
        """Ask for the prompts of the last trial in another order, beside another one; return the differences."""
        again: list[float] = []
        try:
            for places in self._places:
                again += reversed(self._read(places[::-1], beside=[Prompts(-1).of(self._question.prompt_tokens)]))
        except _NotANumberError:
            return []
        return _differences(itertools.chain.from_iterable(self._in_prompts), again)

    def _read(self, places: Sequence[_Place], *, beside: Sequence[list[int]] = ()) -> list[float]:
        """Return the log-probability of each token where the text before it is a prompt.

        One that is not among the best counts as the one of them that is farther away.

        Args:
            places: the tokens.
            beside: prompts that are computed with them.
        """
        answers = self._complete([*(place.before for place in places), *beside], 1)
        found, spreads = [], []
        for place, answer in zip(places, answers, strict=False):
            best = {_token(text): value for text, value in answer["top_logprobs"][0].items()}
            farther = max(best.values(), key=lambda value, place=place: abs(value - place.logprob))
            found.append(best.get(place.token, farther))
            spreads.append(max(best.values()) - min(best.values()))
        if statistics.median(spreads) < FLAT:
            raise _NotAskedError("the model finds all tokens about as likely, as with dummy weights")
        return found

    def _complete(self, prompts: list[list[int]], tokens: int) -> list[Mapping[str, Any]]:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise _NotAskedError("no time")
        self._salt += 1
        body = {
            "model": self._model, "prompt": prompts, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "logprobs": TOP, "return_tokens_as_token_ids": True, "cache_salt": f"decode check {self._salt}",
        }  # fmt: skip
        try:
            choices = self._client.completions(body, timeout_s=left)
            return [choice["logprobs"] for choice in choices]
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            if _NOT_A_NUMBER in said:
                raise _NotANumberError from None
            raise _NotAskedError(f"the server answers {error.code}: {said[:200]}") from None
        except TimeoutError:
            raise _NotAskedError("no time") from None
        except OSError as error:
            raise _NotAskedError(described(error)) from error


def _place(prompt: list[int], answer: Mapping[str, Any], index: int) -> _Place:
    tokens = [_token(text) for text in answer["tokens"]]
    return _Place([*prompt, *tokens[:index]], tokens[index], answer["token_logprobs"][index])


def _differences(one: Iterable[float], other: Iterable[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def _token(text: str) -> int:
    return int(text.removeprefix("token_id:"))
