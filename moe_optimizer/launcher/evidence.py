"""Collects the evidence of a run: the proofs of its servers, and what the launcher itself observes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from moe_optimizer import env
from moe_optimizer.errors import InputError, RequiredNotAppliedError
from moe_optimizer.launcher.deployment import Deployment
from moe_optimizer.launcher.kv_tier import TIER_PASS, observed_tier
from moe_optimizer.launcher.kv_transfer import TRANSFER_PASS, observed_transfer
from moe_optimizer.launcher.replica_traffic import REPLICAS_PASS, observed_traffic
from moe_optimizer.launcher.service import Service
from moe_optimizer.launcher.tuned_config_use import TUNED_PASS, observed_use
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.pass_params import DisaggregationParams, KvCacheParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.outcome import Outcome, judge
from moe_optimizer.proof.record import Proof, read_proofs
from moe_optimizer.proof.shown import flag_decisions
from moe_optimizer.proof.verdict import NO_WORKER, Observed, all_holders_reported, not_running

T = TypeVar("T")
_POLL_S = 0.2
PROOF_WAIT_S = 20.0
"""Chosen: proofs are written within a second of the first forward, and at most one request is missing."""
_WARM_UP_TIMEOUT_S = 120.0
"""Chosen: for one token, the first of a server that may compile something for it."""


class Evidence:
    """The proofs of every server, and what the launcher observed of passes that no single process can prove.

    Args:
        plan: what was requested; the passes that it requires must run.
        deployment: the servers.
        require: further passes that must run, unless workers timed them no faster than vLLM's own.
        strict: every pass must run that workers show.
    """

    def __init__(self, plan: Plan, deployment: Deployment, require: frozenset[str], *, strict: bool) -> None:
        self._plan = plan
        self._deployment = deployment
        self._require = require
        self._strict = strict
        self._proofs: dict[str, tuple[Proof, ...]] = {}
        self._observed: dict[str, Observed] = {}
        self._decoded: dict[str, str] = {}

    def observe(self, pause: Callable[[float], None]) -> None:
        """Observe whether the servers of a group work as one. To be asked before any other request, whose prompt would
        be in the servers' own caches.

        Args:
            pause: sleeps for some seconds, and raises when waiting is pointless.
        """
        if self._is_on(TRANSFER_PASS):
            prefill = self._plan.decision(TRANSFER_PASS).params_as(DisaggregationParams).prefill_servers
            transfer = functools.partial(observed_transfer, self._deployment, prefill_servers=prefill)
            self._observed[TRANSFER_PASS] = while_pausing(pause, transfer)
            if self._plan.decision(TIER_PASS).params_as(KvCacheParams).offload_gib is not None:
                self._observed[TIER_PASS] = while_pausing(pause, lambda: observed_tier(self._deployment))
        if self._is_on(REPLICAS_PASS):
            self._observed[REPLICAS_PASS] = while_pausing(pause, lambda: observed_traffic(self._deployment))

    def collect(self, pause: Callable[[float], None]) -> None:
        """Wait for a complete proof of every worker, within limits. Args: as `observe`."""
        for server in self._deployment.servers:
            self._proofs[server.title] = self._wait_for_proofs(server, pause)
        if self._is_on(TUNED_PASS):
            logs = [server.folder.log_path for server in self._deployment.servers]
            self._observed[TUNED_PASS] = observed_use(self._plan.decision(TUNED_PASS), logs)

    def decoded(self, server: Service, outcome: str) -> None:
        """Note what the decode check says of a server."""
        self._decoded[server.title] = outcome

    def _is_on(self, name: str) -> bool:
        return self._plan.decision(name).status is Status.ON

    @property
    def proofs(self) -> tuple[Proof, ...]:
        """The proofs of all servers."""
        return tuple(proof for proofs in self._proofs.values() for proof in proofs)

    def proofs_of(self, server: Service) -> tuple[Proof, ...]:
        """Return the proofs of one server; a router writes none."""
        return self._proofs.get(server.title, ())

    @property
    def required(self) -> frozenset[str]:
        """Names of the passes that must run."""
        return self._require | self._without_exception

    @property
    def _without_exception(self) -> frozenset[str]:
        """Those of them that must run although workers may have timed them no faster."""
        own = {decision.pass_name for decision in self._plan.decisions if decision.required}
        return frozenset(own.union(self._shown if self._strict else ()))

    @property
    def _shown(self) -> list[str]:
        """Names of the passes whose outcome workers show."""
        return [each.pass_name for each in (*self._plan.plugin_decisions, *flag_decisions(self._plan))]

    def outcome(self) -> Outcome:
        """Return what became of the plan."""
        absent = f"switched off by {env.DISABLE}" if env.read_environment().disabled else NO_WORKER
        return judge(
            self._plan, self._proofs, self.required, absent=absent, observed=self._observed, decoded=self._decoded,
            unless_no_faster=self._require - self._without_exception,
        )  # fmt: skip

    def read_again(self) -> None:
        """Read every proof as it is now.

        Raises:
            InputError: one cannot be read.
        """
        self._proofs = {service.title: read_proofs(service.folder.path) for service in self._deployment.servers}

    def require_not_refused(self) -> None:
        """Look in the proofs of servers that have ended: a worker ends rather than run without a required pass, or with
        kernels that its canary finds wrong.

        Raises:
            RequiredNotAppliedError: a required pass was refused, or a canary failed.
        """
        with contextlib.suppress(InputError):
            self.read_again()
            if any(_refused(self.proofs, name) for name in self.required):
                self.outcome().require(hint=self._deployment.servers[0].log_hint)
            passes = itertools.chain.from_iterable(proof.passes.items() for proof in self.proofs)
            wrong = [f"{name}: {entry.why_not}" for name, entry in passes if entry.canary.startswith("failed")]
            if wrong:
                raise RequiredNotAppliedError(
                    "; ".join(dict.fromkeys(wrong)), hint="serve without our kernels: --disable-flash-dmoe"
                )

    def _wait_for_proofs(self, server: Service, pause: Callable[[float], None]) -> tuple[Proof, ...]:
        shown = self._shown
        if not shown or env.read_environment().disabled:
            return read_proofs(server.folder.path)
        begin, warmed_up = time.monotonic(), False
        while True:
            waited = time.monotonic() - begin
            proofs = read_proofs(server.folder.path)
            missing = not_running(self._plan, proofs, shown)
            if not missing or waited > PROOF_WAIT_S:
                return proofs
            if all_holders_reported(proofs) and all(_refused(proofs, name) for name in missing):
                return proofs
            if not warmed_up:
                # What vLLM ran while it warmed up may not show yet, or may not have been the model: a token is. Waiting
                # for it instead cost every start 3 s.
                with contextlib.suppress(OSError):
                    while_pausing(
                        pause, lambda: server.client.complete("a", max_tokens=1, timeout_s=_WARM_UP_TIMEOUT_S)
                    )
                begin, warmed_up = time.monotonic(), True
            pause(_POLL_S)


def while_pausing(pause: Callable[[float], None], ask: Callable[[], T]) -> T:
    """Return the result of `ask`; `pause` may raise before, so that a stop does not wait for an answer."""
    executor = concurrent.futures.ThreadPoolExecutor(1)
    asked = executor.submit(ask)
    executor.shutdown(wait=False)
    while not concurrent.futures.wait([asked], timeout=_POLL_S).done:
        pause(0.0)
    return asked.result()


def _refused(proofs: Iterable[Proof], name: str) -> bool:
    return any(name in proof.passes and proof.passes[name].why_not for proof in proofs)
