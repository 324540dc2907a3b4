"""Asks a server for its next-token distributions, through the API that it serves."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_optimizer.errors import InputError, ServerFailedError
from moe_optimizer.launcher.http_client import ServerClient, api_key
from moe_optimizer.measure.quality.distributions import Distributions, Row, distributions
from moe_optimizer.measure.quality.probes import Probe

_TIMEOUT_S = 1800.0
"""Chosen: a long prefill on a processor takes minutes."""
_TOKEN = "token_id:"
_NO_NUMBER = float("nan")
_SERVER_ERROR = 500
_NO_JSON = "float values are not JSON compliant"
"""What Python says of NaN, and vLLM 0.32 with status 400."""


class Asked:
    """A server that is asked for distributions.

    Args:
        base_url: of the server.
        model: the name that it serves.
        top_logprobs: the likeliest tokens of each position to ask for (K).
        name: how messages call it.
    """

    def __init__(self, *, base_url: str, model: str, top_logprobs: int, name: str) -> None:
        self._client = ServerClient(base_url, api_key())
        self._model = model
        self._top = top_logprobs
        self._name = name

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
            InputError: the server cannot tell.
        """
        try:
            return self._client.tokenize(text, timeout_s=_TIMEOUT_S)
        except (OSError, ValueError, LookupError) as error:
            raise InputError(f"{self._name}: /tokenize: {error}", hint="vLLM's servers answer it") from None

    def answer(self, probe: Probe) -> Distributions:
        """Return the distributions that a probe asks for.

        A server whose numbers are none (NaN) cannot put them into JSON and answers with an error, or null: then
        positions without a number are returned for each prompt.

        Raises:
            ServerFailedError: it does not answer, or refuses the request.
        """
        rows: list[Row] = []
        requests = [probe.prompts] if probe.together else [(prompt,) for prompt in probe.prompts]
        for first, prompts in enumerate(requests):
            choices = self._choices(prompts, probe)
            for number, choice in enumerate(choices or [None] * len(prompts)):
                prompt = prompts[number]
                rows += _rows(choice, prompt, first + number, generated=bool(probe.generated))
        return distributions(rows)

    def texts(self, prompts: tuple[str, ...], *, max_tokens: int) -> tuple[str, ...]:
        """Return greedy continuations of prompts in one request.

        Raises:
            InputError: it refuses the prompts.
            ServerFailedError: it does not answer.
        """
        body = {"model": self._model, "prompt": list(prompts), "max_tokens": max_tokens, "temperature": 0}
        try:
            return tuple(choice["text"] for choice in self._sent(body))
        except urllib.error.HTTPError as error:
            said = error.read(400).decode("utf-8", errors="replace")
            raise InputError(f"--prompts: {self._name} answers {error.code}: {said}") from None

    def _choices(self, prompts: tuple[tuple[int, ...], ...], probe: Probe) -> list[dict[str, Any]] | None:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": [list(prompt) for prompt in prompts],
            "temperature": 0,
            "max_tokens": max(1, probe.generated),
        }
        if probe.generated:
            # Every sequence stays to the end, so that the batch keeps its size.
            body |= {"logprobs": self._top, "return_tokens_as_token_ids": True, "ignore_eos": True}
        else:
            body |= {"prompt_logprobs": self._top}
        try:
            return self._sent(body)
        except urllib.error.HTTPError as error:
            said = error.read(400).decode("utf-8", errors="replace")
            if (error.code >= _SERVER_ERROR or _NO_JSON in said) and self._client.healthy():
                return None
            what = f"{self._name}: the server answers {error.code} to a {probe.kind}: {said}"
            raise ServerFailedError(what) from None

    def _sent(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            return self._client.completions(body, timeout_s=_TIMEOUT_S)
        except urllib.error.HTTPError:
            raise
        except OSError as error:
            raise ServerFailedError(f"{self._name}: the server does not answer: {error}") from None


def _rows(choice: Mapping[str, Any] | None, prompt: tuple[int, ...], number: int, *, generated: bool) -> Iterator[Row]:
    """Return the rows of one prompt.

    Of a server that answered without a number each position of a prompt is such a row, so that both servers' rows stay
    in step; of generated ones the first.
    """
    if generated:
        logprobs = choice["logprobs"] if choice else None
        if not logprobs:
            yield {0: _NO_NUMBER}, 0, number
            return
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            found = {_token_id(each): _number(value) for each, value in (top or {}).items()}
            yield found | {_token_id(token): _number(logprob)}, _token_id(token), number
        return
    positions = choice["prompt_logprobs"] if choice else None
    for place in range(1, len(prompt)):
        told = positions[place] if positions else {}
        found = {int(each): _number(value["logprob"]) for each, value in told.items()}
        yield found or {prompt[place]: _NO_NUMBER}, prompt[place], number


def _number(value: float | None) -> float:
    return _NO_NUMBER if value is None else float(value)


def _token_id(token: str) -> int:
    if not token.startswith(_TOKEN):
        raise InputError(f"got the token {token!r:.40}, expected one as {_TOKEN}N", hint="servers of vLLM write it so")
    return int(token.removeprefix(_TOKEN))


def answered(path: Path, asked: Asked, probe: Probe) -> Distributions:
    """Return what a file holds that an earlier run wrote, or ask and write it."""
    if path.exists():
        return Distributions.read(path)
    found = asked.answer(probe)
    found.write(path)
    return found
