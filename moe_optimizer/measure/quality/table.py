"""Shows the result of a quality run as text of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from moe_optimizer.errors import printable
from moe_optimizer.measure.quality.intervals import Estimate
from moe_optimizer.measure.quality.result import (
    BatchResult,
    Failure,
    FirstDifference,
    Metrics,
    PromptResult,
    QualityResult,
    TaskResult,
    first_difference,
)

_WIDTH = 80
_NO_NUMBER = "no number"
SAYS_LITTLE = "with random weights this says little"
"""Of a judgement whose reference is flat."""


def render(result: QualityResult) -> str:
    """Return the metrics at each number of tokens, by kernel and by pass, and what fails."""
    lines = [f"{result.plan} against {result.reference}: {result.positions} next-token distributions"]
    if result.passes:
        lines += _wrapped(f"on: {', '.join(result.passes)}")
    lines += ["", _header("tokens in a step")]
    lines += [_row(each.probe, each) for each in result.probes]
    lines += [_row("all", result), ""]
    lines += [_header("kernel")]
    lines += [_row(f"{each.kernel} {_short(each.dtype)}".strip(), each) for each in result.kernels]
    if result.passes_alone:
        lines += ["", _header("one pass alone")]
        lines += [_row(_with(each.pass_name, each.with_passes), each) for each in result.passes_alone]
    lines += [line for each in result.not_alone.items() for line in _wrapped(f"not measured alone: {': '.join(each)}")]
    lines += ["", *_intervals(result), *(line for each in result.batch for line in _batch(each))]
    lines += [line for each in result.tasks for line in _task(each)]
    if result.first_difference is not None and result.first_difference.layers:
        lines += _first_difference(result.first_difference)
    for number, prompt in enumerate(result.prompts, start=1):
        lines += ["", *_prompt(number, prompt, result)]
    return "\n".join([*lines, "", *_verdict(result)])


def _header(first: str) -> str:
    return f"{first:<27}{'KL mean':>10}{'KL p99':>10}{'top-1':>8}{'perplexity':>12}{'same tokens':>13}"


def _row(name: str, found: Metrics) -> str:
    matched, generated = found.greedy_match_tokens, found.generated
    same = "-" if matched is None or matched.value is None else f"{matched.value:.1f} of {generated}"
    return (
        f"{name[:26]:<27}{_nats(found.kl_mean):>10}{_nats(found.kl_p99):>10}{_share(found.top1_agreement):>8}"
        f"{_ratio(found.perplexity_ratio):>12}{same:>13}"
    )


def _short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "fp")


def _with(name: str, others: Sequence[str]) -> str:
    return f"{name} with {', '.join(others)}" if others else name


def _intervals(result: QualityResult) -> Iterable[str]:
    rows = (
        ("KL mean (nats a token)", result.kl_mean, "{:.2g}"),
        ("KL p99", result.kl_p99, "{:.2g}"),
        ("top-1 agreement", result.top1_agreement, "{:.4f}"),
        ("perplexity, plan / reference", result.perplexity_ratio, "{:.4f}"),
        ("same greedy tokens", result.greedy_match_tokens, "{:.1f}"),
    )
    for name, found, form in rows:
        if found is None:
            continue
        if found.value is None or found.low is None or found.high is None:
            yield f"{name:<30}{_NO_NUMBER} at {result.not_numbers} positions"
            continue
        yield f"{name:<30}{in_words(found, form)}"
    yield from _wrapped(
        f"Intervals: 95 %, bootstrap over prompts. KL compares the {result.top_logprobs} likeliest tokens one by one "
        "and all others as one: a lower bound."
    )


def in_words(found: Estimate, form: str) -> str:
    """Return a number with its interval."""
    if found.value is None or found.low is None or found.high is None:
        return _NO_NUMBER
    return f"{form.format(found.value)} ({form.format(found.low)} to {form.format(found.high)})"


def _batch(found: BatchResult) -> Iterable[str]:
    kl, same = found.kl_mean.value, found.greedy_match_tokens.value
    yield from _wrapped(
        f"{found.side}, alone and among {found.tokens}: KL {_NO_NUMBER if kl is None else f'{kl:.2g}'}, "
        f"{0.0 if same is None else same:.1f} of {found.generated} tokens the same"
    )


def _first_difference(found: FirstDifference) -> Iterable[str]:
    yield (
        f"first difference: prompt {found.prompt}, token {found.place}: {found.plan_token} instead of "
        f"{found.reference_token}; what moves it most:"
    )
    for layer in found.layers:
        yield from _wrapped(f"  {layer}", indent="    ")


def _task(found: TaskResult) -> Iterable[str]:
    yield from _wrapped(
        f"{found.task} {found.metric}: {found.plan:.4f}, reference {found.reference:.4f}, difference "
        f"{in_words(found.difference, '{:+.4f}')}; of {found.questions} questions {found.only_reference} lost, "
        f"{found.only_plan} won, p = {found.p_value:.2g}"
    )


def _prompt(number: int, found: PromptResult, result: QualityResult) -> Iterable[str]:
    yield f"prompt {number}: {_quoted(found.prompt)[: _WIDTH - 12]}"
    names, texts = (result.reference, result.plan), (found.reference, found.plan)
    if found.first_difference is None:
        yield f"  same: {_quoted(found.plan)[: _WIDTH - 8]}"
    else:
        yield f"  first difference after {found.first_difference} characters (marked >><<)"
        for name, text in zip(names, texts, strict=True):
            yield from _marked(name, text, found.first_difference)
    if found.in_batch is None:
        return
    for name, text, together in zip(names, texts, (found.in_batch.reference, found.in_batch.plan), strict=True):
        place = first_difference(text, together)
        after = "the same text" if place is None else f"first difference after {place} characters"
        yield f"  {name[:12]}, all prompts in one request: {after}"
        if place is not None:
            yield from _marked(name, together, place)


def _marked(name: str, text: str, place: int) -> Iterable[str]:
    marked = f"{text[:place]}>>{text[place : place + 1]}<<{text[place + 1 :]}"
    return textwrap.wrap(f"{name[:12]:<12} {_quoted(marked)}", _WIDTH, initial_indent="  ", subsequent_indent=" " * 15)


def _quoted(text: str) -> str:
    return printable(text).replace("\n", "\\n")


def _verdict(result: QualityResult) -> Iterable[str]:
    if result.flat:
        yield from _wrapped(f"{result.reference} finds all tokens about as likely: {SAYS_LITTLE}", indent="")
    if not result.failed:
        yield "kept: every threshold of the profile"
        return
    yield "not kept:"
    for each in result.failed:
        yield from _wrapped(f"  {each.pass_name}: {failure_text(each)}", indent="    ")


def failure_text(failure: Failure) -> str:
    """Return what was found, where, and what is allowed."""
    found = _NO_NUMBER if failure.value is None else f"{failure.value:.4g}"
    return f"{failure.metric} {found} ({failure.where}), allowed {failure.limit:.4g}"


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent)


def _nats(found: Estimate) -> str:
    return _NO_NUMBER if found.value is None else f"{found.value:.1e}"


def _share(found: Estimate) -> str:
    return "-" if found.value is None else f"{100 * found.value:.1f}%"


def _ratio(found: Estimate | None) -> str:
    return "-" if found is None or found.value is None else f"{found.value:.4f}"
