"""Defines the requests of the OpenAI API; any other field is for `SamplingParams` to know or refuse."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from moe_optimizer.engine.sampling_params import RequestOutputKind, SamplingParams
from moe_optimizer.errors import InputError

_NOT_VARIABLES = frozenset({
    "chat_template", "conversation", "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict",
    "return_tensors", "tokenize", "tokenizer", "tokenizer_kwargs", "truncation",
})  # fmt: skip
"""What the tokenizer takes beside the variables of a template. A client's own template could compute for ever."""


class ApiRequest(BaseModel):
    """What both kinds of requests share."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = Field(default_factory=dict)
    user: str | None = None
    priority: int = 0
    max_tokens: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """A null is a field that is left open; that of max_tokens means as many as fit."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None or name == "max_tokens"}

    def _sampling_params(self, defaults: SamplingParams, **values: Any) -> SamplingParams:
        """Return the parameters; what the request leaves open is as in `defaults`."""
        recommended = {name: getattr(defaults, name) for name in defaults.model_fields_set}
        fields: dict[str, Any] = {**recommended, **(self.model_extra or {}), **values}
        if "output_kind" in fields:
            raise InputError("output_kind: got a value, expected none: it follows from `stream`")
        for name, needed in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
            if getattr(self, name, None) and not getattr(self, needed):
                raise InputError(f"{name}: got {getattr(self, name)}, expected none without {needed}=true")
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**fields, output_kind=kind)


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

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, values: dict[str, Any]) -> dict[str, Any]:
        if others := _NOT_VARIABLES & values.keys():
            raise ValueError(f"got {min(others)}, expected variables of the chat template")
        return values

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling_params(defaults, max_tokens=limit, logprobs=logprobs)
