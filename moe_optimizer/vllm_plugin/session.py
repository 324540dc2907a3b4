"""Holds the plan and the proof of one vLLM process, and records what each pass did there."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moe_optimizer
from moe_optimizer.errors import RequiredNotAppliedError, described
from moe_optimizer.files import write_atomically
from moe_optimizer.log import get_logger
from moe_optimizer.plan.decision import Applier, Decision, Status
from moe_optimizer.plan.plan import PLAN_FILE, Plan
from moe_optimizer.proof.record import LayerProof, PassProof, PatchProof, Proof, ProofWriter
from moe_optimizer.specs.kernel_speeds import STOCK
from moe_optimizer.vllm_plugin.patch import patch_reports
from moe_optimizer.vllm_plugin.role import process_role
from moe_optimizer.vllm_plugin.server_facts import ServerFacts

logger = get_logger(__name__)

EXPERTS_PASS = "flash_dmoe"
"""The pass whose decision puts our experts class into vLLM's kernel choice."""
_CANARY_PARTS = ("rearrangements", "layers", "graphs")
"""In the order in which the proof shows them."""


class PluginSession:
    """The plan in this process and its proof.

    Args:
        run_dir: where plan.json and the proofs are.
        plan: the plan; None when it is made later, from what vLLM says about itself.
        make_plan: makes the plan then.
        on_plan: called with this session once such a plan is made.
    """

    def __init__(
        self,
        *,
        run_dir: Path,
        plan: Plan | None = None,
        make_plan: Callable[[ServerFacts], Plan] | None = None,
        on_plan: Callable[[PluginSession], None] | None = None,
    ) -> None:
        assert (plan is None) != (make_plan is None), "either a plan or a way to make one"
        self.run_dir = run_dir
        self.plan = plan
        self._make_plan = make_plan
        self._on_plan = on_plan
        self._planning_failure = ""
        self._layers: dict[int, _Layer] = {}
        self._routers: dict[int, str] = {}
        self._other_routers = ""
        self._shapes: Counter[tuple[int, ...]] = Counter()
        self._counting = True
        self._canary_parts: dict[str, dict[str, str]] = {}
        self._other_passes: list[Callable[[Any], tuple[str, ...]]] = []
        self.graph_parts: dict[str, str] = {}
        """Pass -> what compiled graphs depend on besides that it is applied."""
        self.self_checks_s = 0.0
        """Seconds that the layers' self-checks took together."""
        self.pid = os.getpid()
        role = process_role()
        self.writer = ProofWriter(
            run_dir,
            Proof(
                role=role.role,
                rank=role.rank,
                pid=self.pid,
                plan_digest=plan.digest if plan else "",
                versions=_versions(),
            ),
        )
        if plan is not None:
            self._request_plugin_passes(plan)

    def after_fork(self) -> PluginSession:
        """Return a fresh session for a forked child: its proof is its own file."""
        return PluginSession(
            run_dir=self.run_dir,
            plan=self.plan,
            make_plan=None if self.plan else self._make_plan,
            on_plan=self._on_plan,
        )

    @property
    def plans_itself(self) -> bool:
        """Whether the plan is made in this process, in a vLLM that was started without one."""
        return self._make_plan is not None

    @property
    def proof(self) -> Proof:
        """The proof of this process: change it in place, then call `writer.touch`."""
        return self.writer.proof

    def resolve_plan(self, facts: Callable[[], ServerFacts]) -> Plan | None:
        """Return the plan, making it first if need be; None when that failed (the proof says why).

        Raises:
            RequiredNotAppliedError: the profile requires what no plan can give here. Any other failure to plan leaves
                vLLM as it is.
        """
        if self.plan is not None or self._planning_failure or self._make_plan is None:
            return self.plan
        try:
            plan = self._make_plan(facts())
        except RequiredNotAppliedError:
            raise
        except Exception as error:  # noqa: BLE001 - vLLM is building its model; it must go on without us
            self._planning_failure = f"fallback: planning failed: {described(error)}"
            logger.warning("nothing is applied: %s", self._planning_failure)
            self._pass(EXPERTS_PASS, requested="auto").why_not = self._planning_failure
            self.writer.touch()
            return None
        self.plan = plan
        self.proof.plan_digest = plan.digest
        self._request_plugin_passes(plan)
        self._report_unapplied(plan)
        write_atomically(self.run_dir / PLAN_FILE, plan.to_json())
        self.writer.touch()
        if self._on_plan is not None:
            self._on_plan(self)
        if self.proof.rank == 0:
            names = ", ".join(decision.pass_name for decision in plan.plugin_decisions) or "nothing"
            logger.info("profile %s: %s to apply; plan and proofs are in %s", plan.profile_name, names, self.run_dir)
        return plan

    def wanted(self, pass_name: str) -> Decision | None:
        """Return the plan's decision of a pass if it is on and the plugin's to carry out, else None."""
        decisions = () if self.plan is None else self.plan.plugin_decisions
        return next((each for each in decisions if each.pass_name == pass_name), None)

    def applied(self, pass_name: str, *, kernel: str, isa: str) -> None:
        """Note that a pass took effect for at least one layer."""
        entry = self._pass(pass_name)
        entry.applied, entry.kernel, entry.isa = True, kernel, isa
        self.writer.touch()

    def checked(self, pass_name: str, outcome: str, *, of: str = "layers") -> None:
        """Note the outcome of the latest canary of a pass.

        Args:
            pass_name: the pass.
            outcome: in words.
            of: which part of the canary: "rearrangements", "layers" or "graphs". The proof has them in this order.
                Layers that are tried anew make the other parts out of date.
        """
        parts = {} if of == "layers" else self._canary_parts.get(pass_name, {})
        self._canary_parts[pass_name] = parts = {**parts, of: outcome}
        self._pass(pass_name).canary = "; ".join(parts[each] for each in _CANARY_PARTS if each in parts)
        self.writer.touch()

    @contextlib.contextmanager
    def not_counting(self) -> Iterator[None]:
        """Leave what runs in the block out of the calls: it is no request's."""
        self._counting = False
        try:
            yield
        finally:
            self._counting = True

    def ran(self, pass_name: str) -> None:
        """Note that a pass without a kernel of its own did its work in a forward."""
        self._pass(pass_name).ran = True
        self.writer.touch()

    def rearranged(self, pass_name: str, moved_experts: int) -> None:
        """Note that experts were placed anew by their measured load, and how many slots changed."""
        entry = self._pass(pass_name)
        entry.rearrangements += 1
        entry.moved_experts += moved_experts
        self.writer.touch()

    def refused(self, pass_name: str, reason: str, *, timed_no_faster: bool = False) -> None:
        """Note that a pass does not take effect for a layer, or at all.

        Args:
            pass_name: the pass.
            reason: why not.
            timed_no_faster: whether the reason is that this process timed it, and vLLM's own is as fast.

        Raises:
            RequiredNotAppliedError: the plan requires the pass, so the server must not come up without it.
        """
        entry = self._pass(pass_name)
        entry.timed_no_faster = timed_no_faster and (entry.timed_no_faster or not entry.why_not)
        if reason not in entry.why_not:
            entry.why_not = f"{entry.why_not}; {reason}" if entry.why_not else reason
        self.writer.touch()
        decision = self.wanted(pass_name)
        if decision is not None and decision.required:
            self.writer.write()
            raise RequiredNotAppliedError(f"{pass_name}: required, but not applied: {reason}")

    @contextlib.contextmanager
    def falling_back(self, pass_name: str, what: str = "") -> Iterator[None]:
        """Refuse a pass if the block fails, and end the block there: vLLM goes on without it.

        Raises:
            RequiredNotAppliedError: as `refused`, also from inside the block.
        """
        try:
            yield
        except RequiredNotAppliedError:
            raise
        except Exception as error:  # noqa: BLE001 - the process is vLLM's
            self.refused(pass_name, f"{what}fallback: {described(error)}")

    def add_layer(self, pass_names: Sequence[str], address: int, layer: LayerProof) -> None:
        """Count a layer's calls for these passes, under the address of its weights."""
        layer.router = self._routers.get(address, self._other_routers)
        self._layers[address] = _Layer(layer, tuple(self._pass(name) for name in pass_names))
        for entry in self._layers[address].entries:
            entry.layers += (layer,)
        self.writer.touch()

    def layers_of_shape(self, shape: tuple[int, ...]) -> int:
        """Count a layer whose experts have this shape; return how many were counted before it."""
        self._shapes[shape] += 1
        return self._shapes[shape] - 1

    def ask_of_layers(self, passes_of: Callable[[Any], tuple[str, ...]]) -> None:
        """Call `passes_of` for each loaded layer of our kernels, to get further passes that the layer counts for."""
        if passes_of not in self._other_passes:
            self._other_passes.append(passes_of)

    def other_passes(self, layer: Any) -> tuple[str, ...]:
        """Return the passes that a loaded vLLM layer counts for besides those of its kernel."""
        return tuple(name for passes_of in self._other_passes for name in passes_of(layer))

    def layer_at(self, address: int) -> LayerProof:
        """Return the proof entry of the layer whose weights are at `address`.

        Raises:
            KeyError: no layer was added under it.
        """
        return self._layers[address].proof

    def called(
        self, address: int, tokens: int, describe: Callable[[], tuple[Sequence[str], LayerProof]], *, kernel: str = ""
    ) -> None:
        """Note one run of our kernel. Called in every forward, so it is a few dictionary reads and additions.

        Args:
            address: of the layer's weights.
            tokens: in this call.
            describe: passes and proof entry of a layer that `add_layer` was not called for.
            kernel: which of several kernels ran; "" where there is one.
        """
        if not self._counting:
            return
        if address not in self._layers:
            pass_names, described_layer = describe()
            self.add_layer(pass_names, address, described_layer)
        known = self._layers[address]
        ran = all(entry.ran for entry in known.entries)
        layer = known.proof
        layer.calls += 1
        layer.tokens += tokens
        if kernel:
            layer.calls_by_kernel[kernel] = layer.calls_by_kernel.get(kernel, 0) + 1
        for entry in known.entries:
            if not entry.ran:
                entry.ran = all(each.calls or each.why_plain for each in entry.layers)
        self.writer.touch(counts=ran)

    def routes(self, address: int | None, how: str) -> None:
        """Note what multiplies the gate and chooses the experts of the layer whose weights are at `address`.

        None: of the layers for which it is not noted.
        """
        if address is None:
            self._other_routers = how
        else:
            self._routers[address] = how

    def routed(self, address: int) -> None:
        """Note one forward whose experts our launch chose."""
        known = self._layers.get(address)
        if known is not None and self._counting:
            known.proof.router_calls += 1
            self.writer.touch(counts=True)

    def called_stock(self, address: int) -> None:
        """Note one run of vLLM's own kernel for a layer of ours, as the plan says for that many tokens."""
        known = self._layers.get(address)
        if known is not None and self._counting:
            counts = known.proof.calls_by_kernel
            counts[STOCK] = counts.get(STOCK, 0) + 1
            self.writer.touch(counts=True)

    def patches_changed(self) -> None:
        """Copy the state of all patches into the proof."""
        self.proof.patches = tuple(
            PatchProof(target=report.patch.target, state=report.state.value, detail=report.detail)
            for report in patch_reports()
        )
        self.writer.touch()

    def _pass(self, pass_name: str, *, requested: str = "") -> PassProof:
        return self.proof.passes.setdefault(pass_name, PassProof(requested=requested))

    def _request_plugin_passes(self, plan: Plan) -> None:
        for decision in plan.plugin_decisions:
            self._pass(decision.pass_name).requested = decision.value

    def _report_unapplied(self, plan: Plan) -> None:
        """Log the decisions that cannot be applied under plain `vllm serve`: refused wishes, and vLLM arguments."""
        for warning in plan.warnings:
            logger.warning("%s", warning)
        for decision in plan.decisions:
            if decision.pass_name == EXPERTS_PASS and decision.status is Status.OFF:
                logger.warning("%s is off: %s", decision.pass_name, decision.reason)
            if decision.status is Status.REFUSED:
                entry = self._pass(decision.pass_name, requested=decision.wish.value)
                entry.why_not = f"refused: {decision.reason}"
            if decision.status is not Status.ON or decision.applier in (Applier.PLUGIN, Applier.NONE):
                continue
            needs = " ".join(decision.vllm_args.words) or ", ".join(f"{k}={v}" for k, v in decision.env.items())
            entry = self._pass(decision.pass_name, requested=decision.value)
            entry.why_not = f"not applied: needs {needs}" if needs else f"not applied: needs {decision.applier.value}"
            logger.warning("%s (%s) is %s", decision.pass_name, decision.value, entry.why_not)


@dataclass(frozen=True, slots=True)
class _Layer:
    proof: LayerProof
    entries: tuple[PassProof, ...]
    """The passes that it counts for."""


def _versions() -> dict[str, str]:
    versions = {"moe_optimizer": moe_optimizer.__version__, "python": platform.python_version()}
    for name in ("vllm", "torch"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            versions[name] = str(version)
    return versions


_current: PluginSession | None = None


def start_session(session: PluginSession) -> PluginSession:
    """Make `session` this process's own, unless it has one, and start its proof file."""
    global _current  # noqa: PLW0603 - one per process, as vLLM's own plugin state
    if _current is None:
        _current = session
        session.writer.start()
    return _current


def current_session() -> PluginSession | None:
    """Return this process's session; None when the plugin is not active in it."""
    global _current  # noqa: PLW0603
    if _current is not None and _current.pid != os.getpid():
        forked = _current.after_fork()
        _current = None
        session = start_session(forked)
        # The parent's patches are in this process too; nothing installs them again.
        session.patches_changed()
        return session
    return _current


def current_decision(pass_name: str) -> tuple[PluginSession, Decision]:
    """Return this process's session and its plan's decision about a pass that is known to be on."""
    session = current_session()
    assert session is not None, f"{pass_name}: this process follows no plan"
    decision = session.wanted(pass_name)
    assert decision is not None, f"{pass_name}: the plan does not have it on"
    return session, decision
