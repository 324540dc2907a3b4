"""Shows the result of a benchmark as text of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from moe_optimizer.measure.bench.result import BenchResult, LoadResult, SideResult, Verdict
from moe_optimizer.measure.bench.statistics import Spread, ratio_in_words
from moe_optimizer.measure.bench.trace import Load
from moe_optimizer.plan_context.api_servers import API_SERVERS_FLAG
from moe_optimizer.specs.quantity import bytes_in_words

_METRICS = {"tpot_ms": "time per output token", "ttft_ms": "time to first token", "output_tokens_per_s": "tokens/s"}
_WIDTH = 80


def render(result: BenchResult) -> str:
    """Return the sides under each load, what their first minute was like, and the verdicts."""
    how = "side by side" if result.together else "started in turns"
    lines = [*_wrapped(f"{result.workload}: {result.description}"), f"{result.repetitions} repetitions, {how}", ""]
    lines += [
        f"{'load':<15}{'side':<18}{'TPOT ms':>8} {'p99':>7} {'TTFT ms':>8} {'p99':>8} {'tokens/s':>9}",
        *(
            _row(result.sides[side], load)
            for load in range(len(result.sides[0].loads))
            for side in range(len(result.sides))
        ),
        "",
    ]
    lines += [line for side in result.sides for line in _about(side)]
    if result.verdicts:
        lines += ["", *_verdicts(result)]
    lines += [line for side in result.sides for line in _expected(side)]
    return "\n".join(lines)


def _row(side: SideResult, number: int) -> str:
    load = side.loads[number]
    tpot, tpot_99 = _pair(load.tpot_ms)
    ttft, ttft_99 = _pair(load.ttft_ms)
    name = str(Load(clients=load.clients, rate=load.rate))
    row = (
        f"{name:<15}{side.name[:17]:<18}{tpot:>8} {tpot_99:>7} {ttft:>8} {ttft_99:>8} {load.output_tokens_per_s:>9.1f}"
    )
    return row + _further(load)


def _further(load: LoadResult) -> str:
    parts = []
    if load.goodput_per_s is not None:
        parts.append(f"{load.goodput_per_s:.2f} of {load.requests_per_s:.2f} requests/s within the limits")
    if load.joules_per_token is not None:
        parts.append(f"{load.joules_per_token:.3f} J per output token")
    if load.discarded:
        rounds = "round" if load.discarded == 1 else "rounds"
        parts.append(f"{load.discarded} {rounds} thrown away: kernels were compiled meanwhile")
    return f"\n{'':<15}{'; '.join(parts)}" if parts else ""


def _about(side: SideResult) -> Iterable[str]:
    facts = []
    if side.ready_s:
        facts.append("ready after " + ", ".join(f"{each:.0f}" for each in side.ready_s) + " s")
    facts.append(f"first requests: TTFT {side.warm.ttft_ms.median:.0f} ms, p99 {side.warm.ttft_ms.p99:.0f} ms")
    if side.warm.compilations is not None:
        names = f" ({'; '.join(side.warm.compiled)})" if side.warm.compiled else ""
        facts.append(f"compiled after ready: {side.warm.compilations}{names}")
    if side.memory.gpu_bytes is not None:
        facts.append(f"GPU memory {bytes_in_words(side.memory.gpu_bytes)}")
    if side.memory.process_bytes is not None:
        facts.append(f"processes {bytes_in_words(side.memory.process_bytes)}")
    yield from _wrapped(f"{side.name}: {'; '.join(facts)}")
    yield from _held_up(side)
    yield from _saturated(side)
    if side.memory.parts:
        parts = [
            f"{each.part} {bytes_in_words(each.planned_bytes)} / {bytes_in_words(each.found_bytes)}"
            for each in side.memory.parts
        ]
        words = f"memory of a worker, planned / found: {', '.join(parts)}"
        yield from textwrap.wrap(words, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    if side.passes:
        yield from textwrap.wrap(f"on: {', '.join(side.passes)}", _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _held_up(side: SideResult) -> Iterable[str]:
    load = side.held_up
    if load is None or load.api_servers is None:
        return
    use = load.api_servers
    who, each = (f"the {use.processes} API servers were", " each") if use.processes > 1 else ("the API server was", "")
    words = (
        f"{Load(clients=load.clients, rate=load.rate)}: {who} busy for {100 * use.core_share:.0f} % of a core{each}, "
        f"{use.us_per_token:.0f} us a token; more of them may help (-- {API_SERVERS_FLAG} {side.most_api_servers})"
    )
    yield from textwrap.wrap(words, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _saturated(side: SideResult) -> Iterable[str]:
    """Yield what was learned of the machine: what an API server takes for a token."""
    times = [load.front_end_time("") for load in side.loads if load.front_end_saturated]
    told = [f"{each.us_per_token:.0f} us with {each.clients} clients" for each in times if each is not None]
    if told:
        words = f"tokens waited for the API server; for each it takes {', '.join(told)}"
        yield from textwrap.wrap(words, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _verdicts(result: BenchResult) -> Iterable[str]:
    ours, theirs = result.sides[0].name, result.sides[1].name
    yield from _wrapped(f"{ours} against {theirs} (intervals hold together with 95 % confidence)")
    for each in result.verdicts:
        yield f"  {each.load:<15}{_METRICS[each.metric]:<23}{_sentence(each)}"


def _expected(side: SideResult) -> Iterable[str]:
    if side.expected:
        yield from _wrapped(f"what the plan expects of each pass of {side.name}; the verdicts are of all together")
    for each in side.expected:
        head = f"  {each.pass_name:<19}"
        yield from textwrap.wrap(str(each), _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def _wrapped(text: str) -> Iterable[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ")


def _sentence(verdict: Verdict) -> str:
    interval = f"({ratio_in_words(verdict.low)} to {ratio_in_words(verdict.high)})"
    if verdict.verdict == "no difference shown":
        return f"no difference shown {interval}"
    return f"{verdict.verdict}: {ratio_in_words(verdict.ratio)}x {interval}"


def _pair(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "-", "-"
    digits = 2 if spread.median < 100 else 1
    return f"{spread.median:.{digits}f}", f"{spread.p99:.{digits}f}"
