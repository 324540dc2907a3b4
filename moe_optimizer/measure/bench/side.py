"""Starts and describes the servers that a benchmark compares."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from moe_optimizer import env
from moe_optimizer.errors import InputError, ServerFailedError
from moe_optimizer.files import read_json
from moe_optimizer.inspection.software import one_api_server
from moe_optimizer.launcher.compile_caches import compile_caches
from moe_optimizer.launcher.http_client import ServerClient, api_key
from moe_optimizer.launcher.server_info import ServerInfo
from moe_optimizer.launcher.stock_start import keep_stock_start
from moe_optimizer.launcher.supervisor import Supervisor
from moe_optimizer.launcher.warm_up import DEFAULT_LIMIT_S
from moe_optimizer.log import get_logger
from moe_optimizer.measure.bench.gpu_counters import memory_bytes
from moe_optimizer.measure.bench.memory_parts import memory_parts
from moe_optimizer.measure.bench.result import MemoryUse
from moe_optimizer.measure.expected_gains import ExpectedGain, expected_gains
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.json_codec import decode, encode
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan_context.api_servers import most_api_servers
from moe_optimizer.process_environment import changed_environment
from moe_optimizer.proof.record import read_proofs
from moe_optimizer.proof.shown import flag_decisions
from moe_optimizer.proof.verdict import model_holders, not_running

logger = get_logger(__name__)

_FACTS_BYTES = 4096
_STOCK_ENVIRONMENT = {env.DISABLE: "1"}
STOCK = "stock"
"""The name of the side that is vLLM alone: the plugin changes nothing, and the arguments are only the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A server that runs by a plan, or one that runs already."""

    name: str
    plan: Plan | None
    url: str | None = None
    """Of a server that somebody else started; nobody proves that it runs by a plan."""

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes that are on."""
        if self.plan is None or self.name == STOCK:
            return ()
        return tuple(each.pass_name for each in self.plan.decisions if each.status is Status.ON)

    @property
    def expected(self) -> tuple[ExpectedGain, ...]:
        """What the plan expects of the passes that are on."""
        return expected_gains(self.plan) if self.plan is not None and self.passes else ()

    @property
    def most_api_servers(self) -> int:
        """How many API servers a plan may give each server; 1 where its processes are not ours to see."""
        if self.plan is None:
            return 1
        variable = one_api_server({**os.environ, **self.plan.serve_env})
        return most_api_servers(self.plan, one_by_variable=bool(variable))

    @property
    def served(self) -> Any:
        """What its plan has served, as JSON values; not why: a reason may name what was measured meanwhile."""
        if self.plan is None:
            return None
        decided = [(each.pass_name, each.status.value, each.value, encode(each.params)) for each in self.plan.decisions]
        return [self.plan.serve_args.words, dict(self.plan.serve_env), encode(self.plan.group), decided]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFacts:
    """What one start of a server was like."""

    ready_s: float | None
    """None for a server that somebody else started."""
    memory: MemoryUse
    compilations: int | None
    """Kernels compiled after the server said it was ready; None where nobody counts them."""
    compiled: tuple[str, ...] = ()
    """The last of them, with the step that needed each."""
    stop_s: float | None = None
    """Seconds that it took to stop it, and those beside it; None where nobody has looked."""

    def to_json(self) -> str:
        """Return the form that `read_start` reads."""
        return json.dumps(encode(self))


def start_path(folder: Path, key: str) -> Path:
    """Return the file that holds the facts of one start."""
    return folder / f"{key}.start.json"


def read_start(path: Path) -> StartFacts:
    """Read the facts of one start.

    Raises:
        InputError: they cannot be read.
    """
    return decode(StartFacts, read_json(path, max_bytes=_FACTS_BYTES), origin=str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSide:
    """A server that answers."""

    base_url: str
    model: str
    max_model_len: int
    ready_s: float | None
    info: ServerInfo | None
    planned: MemoryPlan | None = None
    caches: Mapping[str, str] = field(default_factory=dict)
    """Variables with which it was started that name folders of compiled kernels."""
    ask_to_stop: Callable[[], None] = lambda: None
    """Tells it to end, and does not wait: several servers then end at the same time."""

    def check_alive(self, name: str) -> None:
        """Refuse to go on with a server that has ended or does not answer.

        Raises:
            ServerFailedError: says which.
        """
        for server in self.info.servers if self.info else ():
            if not psutil.pid_exists(server.pid) or psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE:
                raise ServerFailedError(f"{name}: the server has ended", hint=f"its log: {server.log_path}")
        if not ServerClient(self.base_url, api_key()).healthy():
            raise ServerFailedError(f"{name}: {self.base_url}/health does not answer 200")

    @property
    def pids(self) -> tuple[int, ...]:
        """The first process of each of its servers; none of a server that somebody else started."""
        return tuple(server.pid for server in self.info.servers) if self.info else ()

    @property
    def run_dirs(self) -> tuple[Path, ...]:
        """Folders of its servers; their workers write proofs there, if they have our plugin."""
        return tuple(server.log_path.parent for server in self.info.servers) if self.info else ()

    def facts(self) -> StartFacts:
        """Return what this start was like, and what the server uses now."""
        proofs = [proof for folder in self.run_dirs for proof in model_holders(read_proofs(folder))]
        counts = [proof.compilations for proof in proofs if proof.compilations is not None]
        return StartFacts(
            ready_s=self.ready_s, memory=self._memory(),
            compilations=sum(each.after_ready for each in counts) if counts else None,
            compiled=tuple(said for each in counts for said in each.last),
        )  # fmt: skip

    def _memory(self) -> MemoryUse:
        tree = [
            each for pid in self.pids for each in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))
        ]
        resident = sum(each.memory_info().rss for each in tree)
        used = memory_bytes({each.pid for each in tree})
        proofs = [proof for folder in self.run_dirs for proof in model_holders(read_proofs(folder))]
        return MemoryUse(
            gpu_bytes=None if used is None else int(used),
            process_bytes=resident or None,
            parts=memory_parts(self.planned, proofs) if self.planned is not None else (),
        )


class Starting(Protocol):
    """Starts the server of a side as `starting` does, which is one."""

    def __call__(
        self, side: Side, *, run_dir: Path, ready_timeout_s: float
    ) -> AbstractContextManager[Callable[[], RunningSide]]:
        """As `starting`."""
        ...


@contextlib.contextmanager
def opened(side: Side, *, run_dir: Path, ready_timeout_s: float) -> Iterator[RunningSide]:
    """Start the server of a side, wait until it is ready, and stop it at the end of the block.

    Raises: as `starting` and the function that it yields.
    """
    with starting(side, run_dir=run_dir, ready_timeout_s=ready_timeout_s) as wait:
        yield wait()


@contextlib.contextmanager
def starting(
    side: Side, *, run_dir: Path, ready_timeout_s: float, warm_up_s: float = DEFAULT_LIMIT_S
) -> Iterator[Callable[[], RunningSide]]:
    """Start the server of a side and stop it at the end of the block; one with a URL is only asked.

    `warm_up_s` are the most seconds of our warm-up, which vLLM alone does not have.

    Yields a function that waits until the server is ready. What runs must be what was planned: a benchmark of something
    else would be worse than none. The function raises:

    - RequiredNotAppliedError: an optimization of the plan does not run. One that workers timed no faster than vLLM's
      own may stay away where it is not required by name, which is logged.
    - ServerFailedError: the server died, was not ready in time, or does not answer at its URL.
    """
    if side.url is not None:
        url = side.url
        yield lambda: ask(url)
        return
    assert side.plan is not None, "a side has a plan or a URL"
    plan, changes = side.plan, dict(_STOCK_ENVIRONMENT if side.name == STOCK else {})
    shown = () if changes else (*plan.plugin_decisions, *flag_decisions(plan))
    required = frozenset(decision.pass_name for decision in shown)
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        # The server's environment is made of this process's, with the server; another's is made of its own.
        with changed_environment(changes):
            run = Supervisor(plan, run_dir, require=required, warm_up_s=0.0 if changes else warm_up_s)
            stack.enter_context(run.started())

        def wait() -> RunningSide:
            with changed_environment(changes):
                info = run.wait_until_ready(ready_timeout_s)
                if changes:
                    keep_stock_start(plan, info)
                for server in info.servers:
                    for name, why in not_running(plan, server.proofs, required).items():
                        logger.warning("%s runs without %s: %s", side.name, name, why)
                return RunningSide(
                    base_url=info.base_url,
                    model=info.model,
                    max_model_len=ServerClient(info.base_url, api_key()).max_model_len(),
                    ready_s=time.monotonic() - begin,
                    info=info,
                    planned=plan.memory,
                    caches=compile_caches(plan, os.environ),
                    ask_to_stop=run.ask_to_stop,
                )

        yield wait


def ask(url: str) -> RunningSide:
    """Return the server at a URL, that somebody else started.

    Raises:
        InputError: none answers there.
    """
    client = ServerClient(url, api_key())
    try:
        return RunningSide(
            base_url=url, model=client.models()[0], max_model_len=client.max_model_len(), ready_s=None, info=None
        )
    except (OSError, ValueError, LookupError) as error:
        raise InputError(f"{url}: no server of the OpenAI API answers: {error}") from None
