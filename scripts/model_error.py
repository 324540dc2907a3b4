"""Compares the step model with every served record, and writes docs/model_error.md.

    python scripts/model_error.py [--check] [--max-model-error SHARE]

--check only tells whether the page is up to date. The rate of a run is all its tokens over its whole time, as the
benchmarks count it, so the last wave of requests counts, which leaves places empty; predicted rates are of that too.
A rate is judged where the record shows that the server was warm: rounds of the same size before it, of which the last
was no faster than `SETTLED` allows, or the warm-up of moe-optimizer bench. Times to first token are means.
--max-model-error 0.1 fails where predictions are further off on average: of the time per output token, or of what a
pass gains in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.measured_loads import QWEN3_30B  # noqa: E402
from scripts.predicted_loads import Case, by_pass, cases, choices, foreseen, told  # noqa: E402

PAGE = ROOT / "docs" / "model_error.md"
_NAMED = 4
"""Chosen: cases of each kind that are named as the worst."""
_HEAD = """# How wrong the predictions are

Written by `scripts/model_error.py` from the records named below: random weights, of Qwen3-30B-A3B where no other model
is named, vLLM 0.26, closed loops. Random weights route evenly, but those of deepseek_v2 send every token to the same
experts: in BF16 all scores of its router are equal. Where each client sent one request, all came at once. Error:
predicted over measured, less one. A case in italics gave a constant of the model and is left out of the means, as is
one in brackets, whose host did other work on other GPUs at the same time
([layout accuracy](layout_accuracy.md)). How a prediction is made: [layouts](layouts.md).

A rate is all tokens of a run over its whole time, as measured: where the clients do not all find room, the last wave of
requests leaves places empty, and the prediction counts that too. A rate is judged only where the record shows that the
server was warm, because compilation would count as serving: `moe-optimizer bench` sends every load once before it
counts; of other loops the last round before must be on record, and at most 5 % faster. The independent trial published
times per token only, and not how many requests it sent. Times to first token are means: loops of a few requests begin
as bursts, and how far their requests come apart differs from run to run, so they are met less well.

What servers hold that `benchmarks/serving/bench_beside.py` loaded in turns is what their records say was decided. Left
out of those are layers with 16 or 24 experts, drafts, sizes of graphs that were given and not planned, requests of
mixed lengths, and answers of a few tokens, which have no time per token that a step would explain.

"""


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--max-model-error", type=float, metavar="SHARE")
    options = parser.parse_args(arguments)
    found = list(cases())
    text = page(found)
    if options.check:
        same = PAGE.read_text(encoding="utf-8") == text
        print("up to date" if same else "run scripts/model_error.py")
        if not same:
            return 1
    else:
        PAGE.write_text(text, encoding="utf-8")
    too_far = [] if options.max_model_error is None else above(found, options.max_model_error)
    for line in too_far:
        print(line)
    return 1 if too_far else 0


def above(found: list[Case], most: float) -> list[str]:
    """Return what is predicted worse on average than a share of the measured value."""
    errors = {"time per output token": [case.tpot_error for case in found if case.judged]}
    errors |= {f"gain of {name}": [case.error for case in group] for name, group in by_pass(found).items()}
    means = {what: statistics.mean(map(abs, each)) for what, each in errors.items()}
    return [
        f"{what}: mean error {mean:.1%} of {len(errors[what])} cases, expected at most {most:.1%}"
        for what, mean in means.items()
        if mean > most
    ]


def page(found: list[Case]) -> str:
    """Return the page's text."""
    held_out = [case for case in found if case.judged]
    errors = {
        "TPOT": [(case.tpot_error, case) for case in held_out],
        "tokens/s": [(case.rate_error, case) for case in held_out if case.rate_error is not None],
        "TTFT": [(case.ttft_error, case) for case in held_out if case.ttft_error is not None],
    }
    errors = {what: pairs for what, pairs in errors.items() if pairs}
    lines = [f"| | {' | '.join(errors)} |", "|---" + "|--:" * len(errors) + "|"]
    lines.append(f"| cases | {' | '.join(str(len(each)) for each in errors.values())} |")
    for words, summed in (("mean error", statistics.mean), ("median error", statistics.median), ("largest error", max)):
        figures = [summed([abs(error) for error, _ in each]) for each in errors.values()]
        lines.append(f"| {words} | {' | '.join(f'{figure:.1%}' for figure in figures)} |")
    lines += [
        "",
        *_bracketed(found),
        *_told(),
        *_pass_table(found),
        "",
        *_choice_table(found),
        "",
        "The worst cases:",
        "",
    ]
    lines += [line for what, pairs in errors.items() for line in _worst(what, pairs)]
    lines += _worst("TPOT, in brackets", [(case.tpot_error, case) for case in found if case.in_brackets])
    lines += _worst("TPOT, in italics", [(case.tpot_error, case) for case in found if case.fitted])
    lines += _foreseen()
    lines += [
        "",
        "| record | side | layout | clients | TPOT ms, measured | predicted | error "
        "| tokens/s, measured | predicted | error |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [_row(case) for case in found]
    return _HEAD + "\n".join(lines) + "\n"


def _worst(what: str, pairs: list[tuple[float, Case]]) -> list[str]:
    return [
        f"- {what}: {_served(case)}, {case.load.served_as}, {case.load.clients} clients, {error:+.0%} "
        f"(`{case.load.record}`)"
        for error, case in sorted(pairs, key=lambda pair: -abs(pair[0]))[:_NAMED]
    ]


def _foreseen() -> list[str]:
    """Return what is predicted of loads that no record has."""
    rows = [
        f"| {_served(case)} | {case.load.served_as} | {case.load.clients} | {case.prediction.tpot_ms:.2f} "
        f"| {case.rate:,.0f} |"
        for case in foreseen()
    ]
    if not rows:
        return []
    return [
        "",
        "Not measured yet, on H100s, 512 tokens in and 128 out, one request of each client at once:",
        "",
        "| served | layout | clients | TPOT ms, predicted | tokens/s, predicted |",
        "|---|---|--:|--:|--:|",
        *rows,
    ]


def _bracketed(found: list[Case]) -> list[str]:
    """Return what the errors would be with the cases in brackets, where there are any."""
    if not any(case.in_brackets for case in found):
        return []
    counted = [case for case in found if not case.fitted]
    return [f"With the cases in brackets the mean error is {_in_words(_errors(counted))}.", ""]


def _told() -> list[str]:
    """Return what the errors are of loads that another load of their host tells of."""
    if not (pairs := list(told())):
        return []
    plain, known = ([pair[which] for pair in pairs] for which in (0, 1))
    return [
        "What an API server took for a token where it was the limit, which is the median gap between two tokens of a "
        "request over the clients, tells of other loads of its host; `moe-optimizer bench` keeps it for later plans "
        f"of a machine. With it, {len(pairs)} loads are off by {_in_words(_errors(known))}; as the model has it, which "
        f"is what the table below shows, by {_in_words(_errors(plain))}.",
        "",
    ]


def _errors(cases: list[Case]) -> dict[str, list[float]]:
    rates = [abs(case.rate_error) for case in cases if case.rate_error is not None]
    return {"TPOT": [abs(case.tpot_error) for case in cases], "tokens/s": rates}


def _in_words(errors: dict[str, list[float]]) -> str:
    found = {name: each for name, each in errors.items() if each}
    return "; ".join(f"{statistics.mean(each):.1%} of {name}, {max(each):.1%} at most" for name, each in found.items())


def _row(case: Case) -> str:
    load = case.load
    clients = f"*{load.clients}*" if case.fitted else f"({load.clients})" if case.in_brackets else f"{load.clients}"
    rates = "| |" if load.tokens_per_s is None else f"| {load.tokens_per_s:,.0f} | {case.rate:,.0f}"
    error = load.why_no_rate if case.rate_error is None else f"{case.rate_error:+.0%}"
    return (
        f"| {load.record} | {_served(case)} | {load.served_as} | {clients} "
        f"| {load.tpot_ms:.2f} | {case.prediction.tpot_ms:.2f} | {case.tpot_error:+.0%} "
        f"{rates} | {error} |"
    )


def _served(case: Case) -> str:
    """Return what was served: the model, where it is not the one of most records, and the side."""
    return case.load.side if case.load.model == QWEN3_30B else f"{case.load.model}: {case.load.side}"


def _pass_table(found: list[Case]) -> list[str]:
    lines = [
        "What each pass gains in TPOT, where a record has servers with and without it, at the same number of clients "
        "(above 1 is faster). The other passes are in no pair of servers; the plan says why it models no gain of them.",
        "",
        "| pass | cases | measured | predicted | mean error | largest error |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, group in by_pass(found).items():
        measured, predicted = ([getattr(case, key) for case in group] for key in ("measured", "predicted"))
        errors = [abs(case.error) for case in group]
        lines.append(
            f"| {name} | {len(group)} | {min(measured):.2f}x to {max(measured):.2f}x "
            f"| {min(predicted):.2f}x to {max(predicted):.2f}x | {statistics.mean(errors):.1%} | {max(errors):.1%} |"
        )
    return lines


def _choice_table(found: list[Case]) -> list[str]:
    lines = [
        "What would be chosen of the layouts that were measured under one load, and which of them was best. Share: "
        "tokens/s of the chosen one over the best one's; for latency time per output token. Of a layout that several "
        "records have, the mean; the first is named.",
        "",
        "| record | served | clients | goal | chosen | best measured | share |",
        "|---|---|--:|---|---|---|--:|",
    ]
    for each in choices(found):
        load = each.chosen.load
        lines.append(
            f"| {load.record} | {_served(each.chosen)} | {load.clients} | {each.goal} | {load.served_as} "
            f"| {each.best.load.served_as} | {each.ratio:.0%} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
