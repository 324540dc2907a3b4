"""`Reply`: a reply of the OpenAI API, made from the engine's outputs."""

import time
import uuid
from collections.abc import Callable
from itertools import accumulate, chain
from typing import Any

from moe_optimizer.engine.outputs import Logprob, RequestOutput


class Reply:
    """One reply, whole or in chunks. The `n` samples of each of its prompts are numbered through. With `decode`, which
    gives the text of token ids, the prompts are repeated before the samples.
    """

    def __init__(
        self, model: str, *, chat: bool, n: int, top_logprobs: int = 0, decode: Callable[[list[int]], str] | None = None
    ) -> None:
        self._chat, self._n, self._top, self._decode = chat, n, top_logprobs, decode
        self._head = {"id": f"{'chat' * chat}cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._places: dict[int, int] = {}
        """Where in its text the next token of a sample begins."""
        self._num_prompt = self._num_output = self._num_cached = 0

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the reply that waits for the end."""
        several = [self._choices(position, output, "message") for position, output in enumerate(outputs)]
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": list(chain(*several)), "usage": self._usage()}

    def chunk(self, position: int, output: RequestOutput) -> dict[str, Any] | None:
        """Return a chunk of a streamed reply; None if nothing is new."""
        choices = self._choices(position, output, "delta")
        return self._chunk(choices) if choices else None

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a client that asks for `include_usage`."""
        return {**self._chunk([]), "usage": self._usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt, "completion_tokens": self._num_output,
            "total_tokens": self._num_prompt + self._num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }  # fmt: skip

    def _choices(self, position: int, output: RequestOutput, part: str) -> list[dict[str, Any]]:
        """Count an output, and return its samples: those of a stream only if something is new."""
        self._num_output += sum(len(sample.token_ids) for sample in output.outputs)
        if output.finished:
            self._num_prompt += len(output.prompt_token_ids)
            self._num_cached += output.num_cached_tokens
        choices = []
        for sample in output.outputs:
            index = position * self._n + sample.index
            first = index not in self._places
            if part == "delta" and not (sample.text or sample.finish_reason or (self._chat and first)):
                continue
            echo = output.prompt or self._decode(output.prompt_token_ids) if first and self._decode else ""
            place = self._places.setdefault(index, 0)
            text, logprobs = echo + sample.text, None
            role = {"role": "assistant"} if first else {}
            if sample.logprobs is not None and self._chat:
                logprobs = _chat_logprobs(sample.token_ids, sample.logprobs, self._top)
            elif sample.logprobs is not None:
                logprobs, self._places[index] = _completion_logprobs(sample.token_ids, sample.logprobs, place)
            choices.append({
                "index": index,
                **({part: {**role, "content": text}} if self._chat else {"text": text}),
                "logprobs": logprobs,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
            })  # fmt: skip
        return choices


def _chat_logprobs(token_ids: list[int], logprobs: list[dict[int, Logprob]], top: int) -> dict[str, Any]:
    def entry(logprob: Logprob) -> dict[str, Any]:
        token = logprob.decoded_token or ""
        return {"token": token, "logprob": logprob.logprob, "bytes": list(token.encode())}

    chosen = zip(token_ids, logprobs, strict=True)
    content = [
        {**entry(each[token_id]), "top_logprobs": [entry(other) for other in each.values() if other.rank <= top]}
        for token_id, each in chosen
    ]
    return {"content": content}


def _completion_logprobs(
    token_ids: list[int], logprobs: list[dict[int, Logprob]], place: int
) -> tuple[dict[str, Any], int]:
    """Return the log-probabilities of tokens whose text begins at `place`, and where it ends."""
    chosen = [each[token_id] for token_id, each in zip(token_ids, logprobs, strict=True)]
    tokens = [each.decoded_token or "" for each in chosen]
    *places, end = accumulate(map(len, tokens), initial=place)
    return {
        "tokens": tokens,
        "token_logprobs": [each.logprob for each in chosen],
        "top_logprobs": [{other.decoded_token or "": other.logprob for other in each.values()} for each in logprobs],
        "text_offset": places,
    }, end
