"""Defines which layout a plan takes, what is predicted of it and of the next best, and why not those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_optimizer.specs.layout import Layout, parse_layout
from moe_optimizer.specs.quantity import Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutEstimate:
    """What one layout is predicted to do under the load that is planned for. Modelled, not measured."""

    layout: str
    """As `parse_layout` reads it."""
    num_gpus: int
    tpot_ms: float
    """Time per output token."""
    ttft_ms: float
    """Mean time to first token, waiting for room in the cache or to be read included."""
    tokens_per_s: float
    """Output tokens of all servers."""
    weight_bytes: int
    """On each GPU."""
    kv_tokens: int
    """Tokens that the cache of one data parallel copy holds."""
    running: int
    """Requests that run at once in each data parallel copy of each server."""
    waiting: int
    """Clients of the busiest copy that wait for room."""
    api_servers: int
    """Processes of each server that take requests in and send tokens out."""
    front_end_share: float
    """Of a step of decoding, that each of those is busy; 1: the step is as long as they take."""
    reading_share: float = 0.0
    """Time that the prefill servers need for the prompts, over that of a request which waits for no other: above 1
    prompts wait to be read. 0: no servers are for prompts alone.
    """
    why_not: str = ""
    """Why it is not the one that is planned; "" for that one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherEstimate:
    """What another predictor says of the planned layout."""

    name: str
    """With its version."""
    formats: str = ""
    """Of experts, other matrices and cache, as it was asked for them."""
    tpot_ms: float | None = None
    tokens_per_s: float | None = None
    differs: bool = False
    """Whether one of the two is more than a quarter away from ours."""
    why_none: str = ""
    """Why it says nothing of it; "": it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """The layout of a plan and the five best."""

    goal: str
    """latency, balanced or throughput."""
    clients: int
    ttft_limit_ms: float | None
    tpot_limit_ms: float | None
    chosen: str
    pinned_by: str
    """Who asked for exactly this layout; "": the search chose it."""
    estimates: tuple[LayoutEstimate, ...]
    """The chosen one first, then the next best; at most five."""
    num_layouts: int
    """Layouts that were compared."""
    parts_us: Mapping[str, Quantity] = field(default_factory=dict)
    """The parts of a decode step of the chosen layout."""
    front_end_us: Quantity | None = None
    """What an API server takes for a token that answers all requests of an engine of the chosen layout; None in plans
    of earlier versions.
    """
    own_front_end_share: float | None = None
    """Of a decode step of the chosen layout, that each API server would be busy where vLLM itself sets their number;
    None in plans of earlier versions.
    """
    other: OtherEstimate | None = None

    @property
    def layout(self) -> Layout:
        """The chosen layout."""
        return parse_layout(self.chosen)

    @property
    def estimate(self) -> LayoutEstimate:
        """What is predicted of the chosen layout."""
        return self.estimates[0]


def waiting_in_words(waiting: int, running: int, *, copies: int) -> str:
    """Return how many requests of a copy wait, which is most of a long time to the first token."""
    where = " of each copy" if copies > 1 else ""
    return f"{waiting} of {waiting + running} requests{where} wait for room in the cache"
