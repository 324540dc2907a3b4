"""Defines what every pass is: a name, a flag, and the steps in which it decides."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan.server_group import ServerGroup
from moe_optimizer.plan_context.context import PlanContext


class OptimizationPass(ABC):
    """One optimization as a decision.

    Lifecycle: a pass is created once and holds no state. For each plan, in the order of the registry,
    `decide` asks in turn
      1. is it wished? off -> `when_off`, status OFF;
      2. `why_not`: can this model on this machine with this vLLM do it at all?
         no -> REFUSED when it was asked for by name (mode on), OFF when it was only auto, with the reason;
      3. `choose`: the decision itself.
    A pass reads its context and returns a Decision. It applies nothing, and it does not know other passes
    except through `PlanContext.decided`.
    """

    name: ClassVar[str]
    """The pass's name in profiles, plans and proofs."""
    flag: ClassVar[str]
    """--enable-<flag> and --disable-<flag>."""
    title: ClassVar[str]
    """What it does, for --help: a few words."""
    limits: ClassVar[str]
    """What it does not cover, or what it may cost: a sentence for the plan."""
    no_gain: ClassVar[str]
    """Why no gain is modelled where its decision states none."""
    needs_experts: ClassVar[bool] = False
    """Whether a dense model has nothing to do for it."""
    setting_flags: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Further --enable-/--disable- flags: flag -> (setting of this pass's section, title)."""

    def why_not(self, ctx: PlanContext) -> str:  # noqa: ARG002 - some passes are for every model and machine
        """Return why model, machine or vLLM do not allow it, with what is there and needed; "" when they do."""
        return ""

    @abstractmethod
    def choose(self, ctx: PlanContext) -> Decision:
        """Return the decision for a pass that is wished or auto, and supported."""

    def server_group(self, ctx: PlanContext, serve_args: ServeArguments) -> ServerGroup | None:  # noqa: ARG002
        """Return the servers that this pass, being on, makes of the one with `serve_args`; None: it stays one."""
        return None

    def why_setting_off(self, decision: Decision, setting: str) -> str:  # noqa: ARG002 - most passes have no such setting
        """Return why a setting of `setting_flags` is not carried out under this pass's decision, "" when it is."""
        raise KeyError(f"{self.name} has no setting {setting}")

    def unmet(self, decision: Decision) -> str:
        """Return why what was asked for by the pass's name is not carried out under its decision, "" when it is."""
        return decision.reason if decision.wish is Wish.ON and decision.status is Status.REFUSED else ""

    def when_off(self, ctx: PlanContext, reason: str) -> Decision:
        """Return the decision for a pass that is not used; override where off needs flags too."""
        return self.decision(ctx, Status.OFF, "off", reason, Applier.NONE)

    def is_required(self, ctx: PlanContext) -> bool:
        """Return whether the plan may not do without this pass; override where another decision needs it."""
        return ctx.is_required(self.name)

    def decide(self, ctx: PlanContext) -> Decision:
        """Return this pass's decision (see the class docstring)."""
        wish, origin = ctx.wish(self.name)
        if wish is Wish.OFF:
            return self.when_off(ctx, f"switched off by {origin}")
        reason = "the model has no experts" if self.needs_experts and not ctx.model.is_moe else self.why_not(ctx)
        return self.refused(ctx, reason) if reason else self.choose(ctx)

    def refused(self, ctx: PlanContext, reason: str) -> Decision:
        """Return the decision for a pass that cannot be done here; its params are those of off, for later passes."""
        off = self.when_off(ctx, reason)
        if ctx.wish(self.name)[0] is not Wish.ON:
            return off
        return dataclasses.replace(off, status=Status.REFUSED, value="refused")

    def decision(
        self, ctx: PlanContext, status: Status, value: str, reason: str, applier: Applier, **fields: Any
    ) -> Decision:
        """Return a Decision of this pass with wish, origin and required filled in."""
        wish, origin = ctx.wish(self.name)
        no_gain = fields.pop("no_gain", self.no_gain)
        return Decision(
            pass_name=self.name,
            wish=wish,
            wish_origin=origin,
            status=status,
            value=value,
            reason=reason,
            applier=applier,
            no_gain=no_gain if status is Status.ON and fields.get("gain") is None else "",
            limits=self.limits,
            required=self.is_required(ctx) or (status is Status.ON and ctx.requires_setting_of(self.name)),
            **fields,
        )
