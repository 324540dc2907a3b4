"""Describes the requests of a benchmark: what a YAML file in configs/workloads may say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from moe_optimizer.errors import InputError
from moe_optimizer.near_match import did_you_mean
from moe_optimizer.resources import config_dir
from moe_optimizer.yaml_model import Section, read_section

_TOKENS = Annotated[int, Field(ge=1, le=16_777_216)]
_CLIENTS = Annotated[int, Field(ge=1, le=65_536)]
RANDOM, CORPUS = "random", "corpus"
_RATE = Annotated[float, Field(gt=0, le=1e6)]


class TokenRange(Section):
    """Numbers of tokens, drawn uniformly; both ends are included."""

    least: _TOKENS
    most: _TOKENS

    @model_validator(mode="after")
    def _in_order(self) -> TokenRange:
        if self.least > self.most:
            raise PydanticCustomError("token_range", "`least` not above `most`")
        return self


class RequestKind(Section):
    """One kind of request of a workload."""

    share: float = Field(default=1.0, gt=0, le=1e6)
    """How often it comes, relative to the other kinds."""
    prompt: TokenRange
    output: TokenRange
    """Completions never end early: each has exactly the drawn length."""


class SharedPrefix(Section):
    """A beginning that several prompts share, as system prompts and documents do."""

    tokens: _TOKENS
    """Part of the prompt's length."""
    prefixes: int = Field(default=1, ge=1, le=65_536)
    """How many different ones there are; each request takes one at random."""


class Workload(Section):
    """Requests, and how they arrive.

    Closed loop (`clients`): so many clients, each sending its next request when its last one ended. Open loop
    (`rates`): requests per second, arriving at random, whether the server keeps up or not.
    """

    description: str
    requests: Annotated[tuple[RequestKind, ...], Field(strict=False)]
    clients: Annotated[tuple[_CLIENTS, ...], Field(strict=False)] = ()
    rates: Annotated[tuple[_RATE, ...], Field(strict=False)] = ()
    requests_per_client: int = Field(default=4, ge=1, le=65_536)
    """In a closed loop, of one counted round."""
    seconds: float = Field(default=30.0, gt=0, le=86_400)
    """Over which the requests of one counted round arrive in an open loop."""
    burst: int = Field(default=1, ge=1, le=65_536)
    """Requests that arrive together in an open loop."""
    shared_prefix: SharedPrefix | None = None
    prompts: str = RANDOM
    """`random` tokens; pieces of the shipped `corpus`; or the prompts of a .jsonl file, cut at the drawn length."""
    seed: int = Field(default=0, ge=0, le=2**31)

    @model_validator(mode="after")
    def _consistent(self) -> Workload:
        if not self.requests:
            raise PydanticCustomError("requests", "at least one kind in `requests`")
        if bool(self.clients) == bool(self.rates):
            raise PydanticCustomError("loads", "either `clients` or `rates`")
        shared = self.shared_prefix.tokens if self.shared_prefix else 0
        if any(kind.prompt.least <= shared for kind in self.requests):
            raise PydanticCustomError("prefix", "prompts longer than `shared_prefix.tokens`")
        if self.prompts not in (RANDOM, CORPUS) and not self.prompts.endswith(".jsonl"):
            raise PydanticCustomError("prompts", "`prompts` random, corpus, or a .jsonl file")
        if self.shared_prefix is not None and self.prompts != RANDOM:
            raise PydanticCustomError("prompts", "`prompts` random beside `shared_prefix`")
        return self

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and completion together."""
        return max(kind.prompt.most + kind.output.most for kind in self.requests)


def workload_names() -> tuple[str, ...]:
    """Return the names of the shipped workloads, sorted."""
    return tuple(sorted(path.stem for path in (config_dir() / "workloads").glob("*.yaml")))


def load_workload(name_or_path: str) -> Workload:
    """Return a shipped workload by name, or the one in a YAML file.

    Raises:
        InputError: no such workload, or the file is not a valid one; the message names file, line and field.
    """
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return read_section(Workload, Path(name_or_path), origin=name_or_path, what="workload")
    names = workload_names()
    if name_or_path not in names:
        raise InputError(
            f"unknown workload {name_or_path!r:.80}, expected one of {', '.join(names)} or a file",
            hint=did_you_mean(name_or_path, names) or "a file needs a path with .yaml or .jsonl at its end",
        )
    path = config_dir() / "workloads" / f"{name_or_path}.yaml"
    return read_section(Workload, path, origin=f"configs/workloads/{path.name}", what="workload")
