"""Drives a server that is up through the shapes that traffic can bring, until nothing compiles any more.

What a kernel or a graph is compiled for (batch sizes, prompt lengths, sampling parameters) would otherwise let a user's
request wait. Everything goes over HTTP, as a user's requests do.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.warm_up_requests import Request, Shapes, groups_for
from moe_optimizer.specs.quantity import number_of

DEFAULT_LIMIT_S = 120.0
"""Chosen: the shapes of a round take some seconds on a GPU, compiling for them a minute or two on a first start."""
_ROUNDS = 4
"""Chosen: a second one finds what the first brought; more are needed where two things must meet."""
SETTLE_S = 0.5
"""Until the proofs have what appeared in caches: at most twice `proof.record.WARMING_S`."""
AHEAD_S = 0.05
"""Until requests that are to be decoded beside a prompt have begun."""
_POLL_S = 0.05


class Kernels(NamedTuple):
    """Kernels and graphs that the workers did not have in their processes when they needed them."""

    compiled: int = 0
    loaded: int = 0
    """Found in the cache that an earlier process has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpResult:
    """How a warm-up ended."""

    seconds: float
    compiled: int
    """During the warm-up."""
    settled: bool
    """Whether every group of requests was answered without that anything was compiled."""
    refused: int
    """Requests that the server did not answer, for example because its vLLM does not know a parameter."""
    requests: int
    """To each server."""
    group_s: Mapping[str, float]
    """Seconds of each group, all its rounds."""
    short: bool
    """Whether it was only what an earlier start needed kernels for, and what proves that nothing else does."""
    needed: frozenset[str]
    """Names of the requests for which kernels were compiled or loaded."""
    why_whole: str = ""
    """Why it was not short; "" where it was, or could not have been."""

    def in_words(self) -> str:
        """Return it as a line for the user."""
        whole = f"; of every shape: {self.why_whole}" if self.why_whole else ""
        short = "; the other shapes' kernels are in the caches of an earlier start" if self.short else whole
        end = short if self.settled else "; stopped before nothing compiled any more: a request may still wait for it"
        refused = f", {self.refused} refused" if self.refused else ""
        found = f"{number_of(self.requests, 'request')}{refused}, {number_of(self.compiled, 'compilation')}"
        return f"warmed up in {self.seconds:.0f} s: {found}{end}"


class WarmUp:
    """One warm-up of some servers, which all are sent the same.

    Args:
        clients: the servers.
        model: its name in requests.
        shapes: what each can be asked.
        kernels: counts over all workers.
        limit_s: for everything.
        pause: sleeps for some seconds, and raises when waiting is pointless.
        say: shows progress, a line at a time.
        counted: says whether `kernels` knows of everything already: a worker sees later what only appears in a cache.
    """

    def __init__(
        self,
        clients: Sequence[ServerClient],
        model: str,
        shapes: Shapes,
        kernels: Callable[[], Kernels],
        *,
        limit_s: float,
        pause: Callable[[float], None],
        say: Callable[[str], None],
        counted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._clients, self._model, self._shapes = clients, model, shapes
        self._kernels, self._counted, self._pause, self._say = kernels, counted, pause, say
        self._began = time.monotonic()
        self._deadline = self._began + limit_s
        self._before = self._first = kernels()
        self._round = self._sent = self._refused = 0
        self._group_s: dict[str, float] = {}
        self._needed: set[str] = set()
        self._compiled_for: set[str] = set()

    def run(self, known: Collection[str] | None = None, why_unknown: str = "") -> WarmUpResult:
        """Send every group of requests, and again those of a group up to the last one for which something was compiled,
        until nothing is or the time is over.

        Args:
            known: names of the requests for which an earlier start needed kernels that it has left in caches. Then only
                these are sent and those that prove, and all if something is compiled for one of the latter. None:
                nothing is known of an earlier start.
            why_unknown: in words, where it is None.
        """
        short, settled = known is not None, False
        if known is not None:
            settled = self._send_until_settled(lambda each: each.proves or each.what in known, known)
            new = sorted(self._compiled_for.difference(known))
            short = not new
            why_unknown = f"something was compiled for {new[0]}, which needed nothing before" if new else ""
        if not short:
            settled = self._send_until_settled(lambda _each: True)
        return WarmUpResult(
            seconds=time.monotonic() - self._began, compiled=self._before.compiled - self._first.compiled,
            settled=settled, refused=self._refused, requests=self._sent, group_s=self._group_s, short=short,
            needed=frozenset(self._needed), why_whole=why_unknown,
        )  # fmt: skip

    def _send_until_settled(self, chosen: Callable[[Request], bool], known: Collection[str] | None = None) -> bool:
        """Return whether the last round compiled nothing, within the time.

        Args:
            chosen: says which requests are sent.
            known: ends it where something is compiled for others; None: nothing does.
        """
        again: dict[str, int] | None = None
        for _ in range(_ROUNDS):
            groups = {name: list(filter(chosen, each)) for name, each in self._groups().items()}
            if again is not None:
                groups = {name: each[: again.get(name, 0)] for name, each in groups.items()}
            again = {name: self._send(name, each) for name, each in groups.items() if each}
            if not any(again.values()) and self._compiled_late():
                # It was seen too late to tell which of them needed it.
                again = {name: len(each) for name, each in groups.items()}
                late = {each.what for requests in groups.values() for each in requests}
                self._needed |= late
                self._compiled_for |= late
            unknown = known is not None and self._compiled_for.difference(known)
            if unknown or not any(again.values()) or time.monotonic() >= self._deadline:
                break
        return not any((again or {}).values()) and time.monotonic() < self._deadline

    def _groups(self) -> dict[str, list[Request]]:
        self._round += 1
        return groups_for(self._shapes, seed=self._round - 1)

    def _send(self, name: str, requests: Sequence[Request]) -> int:
        """Send the requests of a group; return the number of the last one for which something was compiled."""
        began, last = time.monotonic(), 0
        sent = number_of(len(requests), "request")
        self._say(f"warming up: round {self._round}, {sent}: {name}, {began - self._began:.0f} s")
        for count, request in enumerate(requests, 1):
            answered = _answered(self._clients, self._model, request, self._deadline, self._pause)
            self._refused += not answered
            before, self._before = self._before, self._kernels()
            if self._before != before:
                self._needed.add(request.what)
            if self._before.compiled != before.compiled:
                self._compiled_for.add(request.what)
                last = count
        self._sent += len(requests)
        self._group_s[name] = self._group_s.get(name, 0.0) + time.monotonic() - began
        return last

    def _compiled_late(self) -> bool:
        """Return whether something was compiled that only now is counted."""
        if not self._counted():
            self._pause(SETTLE_S)
        before, self._before = self._before, self._kernels()
        return self._before.compiled != before.compiled


def _answered(
    clients: Sequence[ServerClient], model: str, request: Request, deadline: float, pause: Callable[[float], None]
) -> bool:
    """Send one request to every server, and the one beside it before; return whether all were answered. `pause` may end
    the wait.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        return True
    executor = concurrent.futures.ThreadPoolExecutor(2 * len(clients))
    sent = []
    for body in filter(None, (request.beside, request.body)):
        sent += [executor.submit(client.generate, {"model": model, **body}, timeout_s=left) for client in clients]
        if request.beside is not None:
            pause(AHEAD_S)
    # Not waited for: when a stop is asked for, the server's end answers what is on the way.
    executor.shutdown(wait=False)
    while concurrent.futures.wait(sent, timeout=_POLL_S).not_done:
        pause(0.0)
    return not any(isinstance(each.exception(), OSError) for each in sent)
