"""Replies of the OpenAI API, made from the engine's outputs."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from moe_optimizer.engine.outputs import CompletionOutput, Logprob, RequestOutput


@dataclass
class Reply:
    """One reply, whole or in chunks. Its prompts' samples are numbered through.

    Args:
        model: name the client knows the model by.
        chat: whether it answers a conversation.
        n: samples per prompt.
        echo: the prompts, where they are repeated before the samples.
    """

    model: str
    chat: bool
    n: int
    echo: list[str] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    reply_id: str = ""
    created: int = 0

    def __post_init__(self) -> None:
        self.reply_id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._begun: set[int] = set()

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the reply that waits for the end."""
        choices = []
        for position, output in enumerate(outputs):
            self._count(output)
            for sample in output.outputs:
                text = self._echoed(position, sample.index) + sample.text
                content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
                choices.append(self._choice(position, sample, content))
        return {**self._head(chunk=False), "choices": choices, "usage": self.usage()}

    def chunk(self, position: int, output: RequestOutput) -> dict[str, Any] | None:
        """Return a chunk of a streamed reply; None if nothing is new."""
        self._count(output)
        choices = []
        for sample in output.outputs:
            index = position * self.n + sample.index
            text, first = sample.text, index not in self._begun
            if not (text or sample.finish_reason or (self.chat and first)):
                continue
            self._begun.add(index)
            if first:
                text = self._echoed(position, sample.index) + text
            content: dict[str, Any] = {"text": text}
            if self.chat:
                content = {"delta": {"role": "assistant", "content": text} if first else {"content": text}}
            choices.append(self._choice(position, sample, content))
        return {**self._head(chunk=True), "choices": choices} if choices else None

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a client that asks for `include_usage`."""
        return {**self._head(chunk=True), "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return how many tokens were read and written."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def _echoed(self, position: int, sample: int) -> str:
        return self.echo[position] if self.echo and sample < self.n else ""

    def _count(self, output: RequestOutput) -> None:
        self.num_output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        if output.finished:
            self.num_prompt_tokens += len(output.prompt_token_ids)
            self.num_cached_tokens += output.num_cached_tokens

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = "text_completion" if not self.chat else "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.reply_id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, position: int, sample: CompletionOutput, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if sample.logprobs is not None:
            make = _chat_logprobs if self.chat else _completion_logprobs
            logprobs = make(sample.token_ids, sample.logprobs)
        return {
            "index": position * self.n + sample.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }


def _chat_logprobs(token_ids: list[int], logprobs: list[dict[int, Logprob]]) -> dict[str, Any]:
    def entry(logprob: Logprob) -> dict[str, Any]:
        token = logprob.decoded_token or ""
        return {"token": token, "logprob": logprob.logprob, "bytes": list(token.encode())}

    return {
        "content": [
            {**entry(each[token_id]), "top_logprobs": [entry(other) for other in each.values()]}
            for token_id, each in zip(token_ids, logprobs, strict=True)
        ]
    }


def _completion_logprobs(token_ids: list[int], logprobs: list[dict[int, Logprob]]) -> dict[str, Any]:
    tokens = [each[token_id].decoded_token or "" for token_id, each in zip(token_ids, logprobs, strict=True)]
    offsets = [sum(len(token) for token in tokens[:place]) for place in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [each[token_id].logprob for token_id, each in zip(token_ids, logprobs, strict=True)],
        "top_logprobs": [{other.decoded_token or "": other.logprob for other in each.values()} for each in logprobs],
        "text_offset": offsets,
    }
