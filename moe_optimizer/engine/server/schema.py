"""Defines the requests of the OpenAI API; any other field is for `SamplingParams` to know or refuse."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moe_optimizer.engine.sampling_params import RequestOutputKind, SamplingParams
from moe_optimizer.errors import InputError


class StreamOptions(BaseModel, extra="forbid"):
    """`stream_options`."""

    include_usage: bool = False


class ApiRequest(BaseModel):
    """What both kinds of requests share."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = None
    priority: int = 0
    max_tokens: int | None = None

    def _sampling_params(self, defaults: SamplingParams, **values: Any) -> SamplingParams:
        """Return the parameters; what the request leaves open is as in `defaults`.

        Raises:
            InputError: a value is outside its range, or there is no parameter of a name.
        """
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        recommended = {name: getattr(defaults, name) for name in defaults.model_fields_set}
        asked = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        fields: dict[str, Any] = {**recommended, **asked, **values, "output_kind": kind}
        return SamplingParams(**fields)


class CompletionRequest(ApiRequest):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]] = Field(min_length=1)
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        return self._sampling_params(defaults, max_tokens=self.max_tokens, logprobs=self.logprobs)


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message as templates read it: parts of text as one text."""
        content = self.content or ""
        if not isinstance(content, str):
            for part in content:
                if part.get("type") != "text":
                    raise InputError(f"messages: got content of type {part.get('type')!r}, expected text")
            content = "".join(str(part.get("text", "")) for part in content)
        return {**self.model_dump(exclude_none=True), "content": content}


class ChatRequest(ApiRequest):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling_params(defaults, max_tokens=limit, logprobs=logprobs)
