"""Renders the Plan for people: model, hardware, memory, decisions, command. ASCII only, apart from names."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from moe_optimizer.errors import printable
from moe_optimizer.plan.decision import Applier, Decision, Gain, Status
from moe_optimizer.plan.layout_table import layout_lines
from moe_optimizer.plan.machine_commands import render_machines
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments, argument_lines
from moe_optimizer.specs.quantity import Quantity, bytes_in_words

_MIN_WIDTH = 60
_MAX_WIDTH = 120
"""Longer lines are hard to read, however wide the terminal."""
_COLORS = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
_ALONE = "Against plain vLLM on the same devices"
_IN_GROUP = "Each of the servers against one plain vLLM of its size"
_STATUS_COLORS = {Status.ON: "green", Status.OFF: "dim", Status.REFUSED: "red", Status.PENDING: "yellow"}


def render_plan(plan: Plan, *, width: int = 80, color: bool = False, explain: bool = False) -> str:
    """Return the plan as text, at most `width` columns except for long words such as paths.

    Args:
        plan: what to show.
        width: columns; brought into [60, 120].
        color: use ANSI colours.
        explain: add who asked, evidence, rejected alternatives and limits to each decision, and the
            source of each part of a step.
    """
    return _Page(width=min(max(width, _MIN_WIDTH), _MAX_WIDTH), color=color, explain=explain).render(plan)


def render_commands(plan: Plan) -> str:
    """Return the commands that serve the plan, as a shell takes them."""
    return textwrap.dedent("\n".join(_Page(width=100, color=False, explain=False)._commands(plan)))


class _Page:
    def __init__(self, *, width: int, color: bool, explain: bool) -> None:
        self.width = width
        self.color = color
        self.explain = explain

    def render(self, plan: Plan) -> str:
        sections = (
            ("Model", self._model(plan)),
            ("Hardware", self._hardware(plan)),
            (f"Memory of each {'GPU' if plan.num_gpus else 'CPU process'}", self._memory(plan)),
            ("Layout", () if plan.layouts is None else layout_lines(plan.layouts, self.width, explain=self.explain)),
            ("Decisions", self._decisions(plan)),
            ("Warnings", self._warnings(plan)),
            ("Command" if plan.group is None else "Commands", self._commands(plan)),
            (_ALONE if plan.group is None else _IN_GROUP, self._difference(plan)),
        )
        version = f"vLLM {plan.vllm_version}" if plan.vllm_version else "no vLLM installed"
        version = "embedded engine" if plan.engine == "embedded" else version
        lines = [self._paint(f"Plan {plan.digest}: profile {plan.profile_name}, {version}", "bold")]
        for title, body in sections:
            written = list(body)
            if written:
                lines += ["", self._paint(title, "bold"), *written]
        return "\n".join(lines) + "\n"

    def _model(self, plan: Plan) -> Iterator[str]:
        model, attention = plan.model, plan.model.attention
        yield from self._wrap(f"{model.name}  {model.architecture or model.model_type}")
        if model.is_moe:
            shared = f" + {model.num_shared_experts} shared" if model.num_shared_experts else ""
            yield from self._wrap(
                f"{model.num_layers} layers, {model.num_moe_layers} of them with {model.num_experts} experts{shared}, "
                f"{model.top_k} used by a token; hidden {model.hidden_size}, expert width {model.moe_intermediate_size}"
            )
        else:
            yield from self._wrap(f"{model.num_layers} layers, dense; hidden {model.hidden_size}")
        stored = f"{model.quant_method}, {model.weight_bits:g} bits" if model.quant_method else model.dtype
        yield from self._wrap(
            f"{_count(model.total_params)} parameters fill memory ({bytes_in_words(model.weight_bytes)}, {stored}); "
            f"{_count(model.active_params)} are used by a token"
        )
        cached = "one latent" if attention.kind == "mla" else f"{attention.num_kv_heads}"
        yield from self._wrap(
            f"{attention.kind} attention, {attention.num_heads} heads, {cached} for keys and values; "
            f"{bytes_in_words(model.kv_bytes_per_token)} of cache per token at 16 bits"
        )

    def _hardware(self, plan: Plan) -> Iterator[str]:
        hardware = plan.hardware
        if plan.num_gpus and hardware.gpu is not None:
            gpu = hardware.gpu
            where = "here" if hardware.origin == "probed" else "assumed"
            machines = f" on {plan.num_nodes} machines" if plan.num_nodes > 1 else ""
            there = hardware.num_gpus * plan.num_nodes
            yield from self._wrap(f"{plan.num_gpus} of {there} x {gpu.name}{machines} ({where})")
            yield from self._wrap(
                f"memory {bytes_in_words(gpu.memory.value)}, {_rate(gpu.memory_bandwidth)}; "
                f"{gpu.gpu_link} {_rate(gpu.gpu_link_bandwidth)}"
            )
        elif hardware.cpu is not None:
            cpu = hardware.cpu
            yield from self._wrap(f"CPU: {cpu.name}, {cpu.cores} cores, {bytes_in_words(cpu.memory.value)} of memory")

    def _memory(self, plan: Plan) -> Iterator[str]:
        memory = plan.memory
        terms = (
            ("weights", memory.weight_bytes, ""),
            ("activations", memory.activation_bytes, ""),
            ("workspace", memory.workspace_bytes, ""),
            ("kv cache", memory.kv_cache_bytes, f"{memory.kv_tokens:,} tokens"),
            ("unused", memory.unused_bytes, "within the budget"),
            ("left alone", memory.total_bytes - memory.budget_bytes, "for everything else"),
        )
        bar_width = self.width - 56
        for name, count, note in terms:
            if not count:
                continue
            filled = round(bar_width * count / memory.total_bytes)
            bar = "#" * filled + "." * (bar_width - filled)
            share = f"{count / memory.total_bytes:6.1%}"
            yield f"  {name:<12}{bytes_in_words(count):>9} {share} [{bar}] {note}".rstrip()
        yield f"  {'total':<12}{bytes_in_words(memory.total_bytes):>9}"
        if self.explain:
            yield from self._wrap(f"how: {memory.ref}", indent=4)

    def _decisions(self, plan: Plan) -> Iterator[str]:
        if plan.engine == "embedded" and not self.explain:
            yield "  none: they are vLLM's; docs/engine.md has the switches of this engine"
            return
        yield self._paint(f"  {'pass':<20}{'asked':<7}{'decided':<13}what", "dim")
        for decision in plan.decisions:
            yield from self._decision(decision)

    def _decision(self, decision: Decision) -> Iterator[str]:
        status = self._paint(f"{decision.status.value:<13}", _STATUS_COLORS[decision.status])
        required = " (required)" if decision.required else ""
        head = f"  {decision.pass_name:<20}{decision.wish.value:<7}"
        value, *more = textwrap.wrap(printable(decision.value) + required, self.width - 42)
        yield head + status + value
        yield from (" " * 42 + line for line in more)
        yield from self._wrap(decision.reason, indent=6)
        if decision.gain is not None:
            yield from self._wrap(_gain(decision.gain, decision.status), indent=6)
        if self.explain:
            yield from self._details(decision)

    def _details(self, decision: Decision) -> Iterator[str]:
        details = [("asked by", decision.wish_origin)]
        if decision.no_gain:
            details.append(("expected gain", f"none is modelled: {decision.no_gain}"))
        details += [("evidence", text) for text in decision.evidence]
        details += [("rejected", f"{choice}: {why}") for choice, why in decision.rejected.items()]
        details += [("limits", decision.limits)] if decision.limits else []
        for label, text in details:
            yield from self._wrap(f"{label}: {text}", indent=6)

    def _warnings(self, plan: Plan) -> Iterator[str]:
        for warning in plan.warnings:
            yield from self._wrap(f"- {warning}", hang=2)

    def _commands(self, plan: Plan) -> Iterator[str]:
        if plan.engine == "embedded":
            head = f"python -m moe_optimizer.cli.engine_server --model {shlex.quote(plan.model.path)}"
            yield from self._command([head], plan.serve_args)
            return
        if plan.num_nodes > 1:
            yield from (printable(f"  {line}".rstrip()) for line in render_machines(plan).splitlines())
            yield ""
            yield "  Only the commands: --render ray."
            yield "  A Kubernetes LeaderWorkerSet: --render lws."
        elif plan.group is None:
            yield from self._serve_command(plan, plan.serve_args, plan.serve_env, "RUN_DIR")
        else:
            for role in plan.group.servers:
                gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, role.gpus))} if role.gpus else {}
                environment = {**plan.serve_env, **role.serve_env, **gpus}
                yield from self._serve_command(plan, role.serve_args, environment, f"RUN_DIR/{role.name}")
                yield ""
            yield from self._command(["vllm-router"], plan.group.router_args)
        if not plan.num_gpus:
            yield ""
            yield "  # The CPU build has no working vllm command; give the same flags to"
            yield "  # python -m vllm.entrypoints.openai.api_server --model"

    def _serve_command(
        self, plan: Plan, arguments: ServeArguments, environment: Mapping[str, str], folder: str
    ) -> Iterator[str]:
        words = [f"{key}={shlex.quote(value)}" for key, value in sorted(environment.items())]
        if any(decision.applier is Applier.PLUGIN for decision in plan.decisions):
            # A placeholder: the launcher names the folder. Without the variable the plugin does nothing.
            words.insert(0, f"MOE_OPTIMIZER_PLAN={folder}/plan.json")
        yield from self._command([*words, f"vllm serve {shlex.quote(plan.model.path)}"], arguments)

    def _command(self, head: list[str], arguments: ServeArguments) -> Iterator[str]:
        width = self.width - len("    " + " \\")
        words = [*head, *(line for argument in arguments.arguments for line in argument_lines(argument.words, width))]
        for index, word in enumerate(words):
            indent = "    " if word.startswith("-") else "  "
            yield printable(indent + word) + (" \\" if index < len(words) - 1 else "")

    def _difference(self, plan: Plan) -> Iterator[str]:
        if plan.engine == "embedded":
            return
        planned, plain = plan.serve_args.arguments, plan.plain_args.arguments
        differing = [("-", each) for each in plain if each not in planned]
        differing += [("+", each) for each in planned if each not in plain]
        width = self.width - len("  + ")
        lines = [(sign, line) for sign, argument in differing for line in argument_lines(argument.words, width)]
        lines += [("+", f"{key}={shlex.quote(value)}") for key, value in sorted(plan.serve_env.items())]
        lines += [("+", f"plugin: {d.pass_name} ({d.value})") for d in plan.decisions if d.applier.value == "plugin"]
        for sign, text in lines or [(" ", "nothing differs")]:
            yield self._paint(printable(f"  {sign} {text}"), {"+": "green", "-": "red", " ": "dim"}[sign])

    def _wrap(self, text: str, *, indent: int = 2, hang: int = 0) -> Iterable[str]:
        return textwrap.wrap(
            printable(text),
            self.width,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + hang),
            break_long_words=False,
            break_on_hyphens=False,
        )

    def _paint(self, text: str, style: str) -> str:
        return f"\033[{_COLORS[style]}m{text}\033[0m" if self.color else text


def _gain(gain: Gain, status: Status) -> str:
    word = "expected gain" if status is Status.ON else "gain it could bring"
    return f"{word}: {gain.ratio.value:.2f}x in {gain.metric} ({gain.ratio.source.value}: {gain.ratio.ref})"


def _rate(quantity: Quantity) -> str:
    return f"{bytes_in_words(quantity.value)}/s ({quantity.source.value})"


def _count(params: int) -> str:
    for factor, unit in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if params >= factor:
            return f"{params / factor:.2f} {unit}"
    return f"{params:,}"
