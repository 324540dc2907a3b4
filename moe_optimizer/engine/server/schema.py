"""What a request of the OpenAI API may say. Fields that are not here are an error."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moe_optimizer.engine.sampling_params import RequestOutputKind, SamplingParams

# Fields of the API that mean the same in SamplingParams, and are left to it to check.
_SAMPLING = (
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens",
)  # fmt: skip


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class _Request(BaseModel):
    """What both kinds of requests share."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int = 0
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None

    def _sampling_params(self, defaults: SamplingParams, **values: Any) -> SamplingParams:
        """Return the parameters; what the request leaves open is as in `defaults`.

        Raises:
            InputError: a value is outside its range.
        """
        chosen = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        recommended = {name: getattr(defaults, name) for name in defaults.model_fields_set}
        return SamplingParams(**{**recommended, **chosen, **values, "output_kind": kind})


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]] = Field(min_length=1)
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """See `_Request`."""
        return self._sampling_params(defaults, max_tokens=self.max_tokens, logprobs=self.logprobs)

    def prompts(self) -> list[str] | list[list[int]]:
        """Return one prompt or several as several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt  # type: ignore[return-value]


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message as templates read it: parts of text as one text."""
        content = self.content
        if isinstance(content, list):
            others = [part.get("type") for part in content if part.get("type") != "text"]
            if others:
                raise ValueError(f"messages: got content of type {others[0]!r}, expected text")
            content = "".join(str(part.get("text", "")) for part in content)
        return {**self.model_dump(exclude_none=True), "content": content or ""}


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """See `_Request`."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self._sampling_params(
            defaults, max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None
        )
