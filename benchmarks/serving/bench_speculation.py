"""Measures what drafts bring: time per output token of two servers, with and without speculation, requests in turn.

The text is code that the bundled model completes (configs/corpus/code.txt), one client, greedy. Both servers run at the
same time and get each prompt one after the other, in changing order, so that a change of the machine's load touches
both. The ratio of the medians has a 95 % interval (bootstrap over prompts).

Run it on a quiet machine:  python benchmarks/serving/bench_speculation.py --write
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_slug, head, host, packages, parser_of, write_record  # noqa: E402
from benchmarks.serving.completions import streamed  # noqa: E402
from benchmarks.serving.plans import free_port, plan_here, served, vllm_version  # noqa: E402
from moe_optimizer.launcher.launch import ServerInfo  # noqa: E402
from moe_optimizer.launcher.supervisor import Supervisor  # noqa: E402
from moe_optimizer.plan.decision import Wish  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.profiles import load_profile  # noqa: E402

MODEL = ROOT / "examples" / "tiny-moe"
CORPUS = ROOT / "configs" / "corpus" / "code.txt"
PROMPT_TOKENS, ANSWER_TOKENS = 256, 128
READY_TIMEOUT_S = 900.0
SIDES = ("off", "on")
_RESAMPLES = 4000


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and with --write store the record."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--prompts", type=int, default=40, help="prompts (default: 40)")
    parser.add_argument("--draft-tokens", type=int, default=3, help="drafts of a step (default: 3)")
    options = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    prompts = prompts_of(options.prompts)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        plans = {side: plan_of(side, options.draft_tokens) for side in SIDES}
        runs = {side: Supervisor(plan, Path(folder) / side) for side, plan in plans.items()}
        for run in runs.values():
            started.enter_context(run.started())
        infos = {side: run.wait_until_ready(READY_TIMEOUT_S) for side, run in runs.items()}
        for side in SIDES:  # what the first answers compile or fill is not counted
            for prompt in prompts[:2]:
                answered(infos[side], prompt)
        before = drafted(infos["on"])
        samples, equal = measure(infos, prompts)
        after = drafted(infos["on"])
        record = make_record(samples, equal, options, load_before=load_before)
        record["drafts"] = {name: after[name] - before[name] for name in after}
        record["servers"] = {side: served(plans[side], infos[side], ("speculation", "flash_dmoe")) for side in SIDES}
    show(record)
    if options.write:
        write_record(record, cpu_slug(record["environment"]["cpu"]), "speculation")
    return 0


def prompts_of(count: int) -> list[list[int]]:
    """Return windows of the corpus in the model's tokens."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    tokens = tokenizer(CORPUS.read_text(encoding="utf-8"))["input_ids"]
    step = (len(tokens) - PROMPT_TOKENS) // count
    return [tokens[i * step : i * step + PROMPT_TOKENS] for i in range(count)]


def plan_of(side: str, draft_tokens: int) -> Plan:
    """Return the balanced profile's plan with the pass off or on."""
    profile = load_profile("balanced")
    section = profile.passes.speculation.model_copy(update={"draft_tokens": draft_tokens})
    profile = profile.model_copy(update={"passes": profile.passes.model_copy(update={"speculation": section})})
    wish = Wish.ON if side == "on" else Wish.OFF
    return plan_here(
        MODEL, profile=profile, wishes={"speculation": (wish, "benchmark")}, port=free_port(), batch_size=4
    )


def answered(info: ServerInfo, prompt: list[int]) -> tuple[float, tuple[int, ...]]:
    """Return the time per output token after the first chunk, in ms, and the answer's tokens."""
    begin, tokens, first = 0.0, [], 0
    for chunk in streamed(info.base_url, str(MODEL), prompt, ANSWER_TOKENS, return_token_ids=True):
        choices = json.loads(chunk)["choices"]
        found = (choices[0].get("token_ids") or []) if choices else []
        if not tokens and found:
            begin, first = time.perf_counter(), len(found)
        tokens += found
    assert len(tokens) == ANSWER_TOKENS, f"{len(tokens)} tokens, expected {ANSWER_TOKENS}"
    return 1e3 * (time.perf_counter() - begin) / (ANSWER_TOKENS - first), tuple(tokens)


def measure(infos: dict[str, ServerInfo], prompts: list[list[int]]) -> tuple[dict[str, list[float]], int]:
    """Return the times of each side, prompt by prompt, and how many answers are equal on both."""
    samples: dict[str, list[float]] = {side: [] for side in SIDES}
    equal = 0
    for index, prompt in enumerate(prompts):
        answers = {}
        for side in SIDES if index % 2 else SIDES[::-1]:
            ms, answers[side] = answered(infos[side], prompt)
            samples[side].append(ms)
        equal += answers["off"] == answers["on"]
    return samples, equal


def drafted(info: ServerInfo) -> dict[str, float]:
    """Return vLLM's counters of drafts so far."""
    import urllib.request

    found = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
    with urllib.request.urlopen(f"{info.base_url}/metrics", timeout=60) as response:
        for line in response.read().decode().splitlines():
            for name in found:
                if line.startswith(f"vllm:spec_decode_num_{name}_total"):
                    found[name] += float(line.rpartition(" ")[2])
    return found


def make_record(
    samples: dict[str, list[float]], equal: int, options: argparse.Namespace, *, load_before: float
) -> dict[str, Any]:
    """Return the record: every sample, and the ratio of the medians with its interval."""
    pairs = list(zip(samples["off"], samples["on"], strict=True))
    draw = random.Random(0)
    ratios = sorted(ratio_of(draw.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    return {
        **head("time per output token without speculation over with it, one client, requests in turn", options.commit),
        "environment": {
            **host(load_before),
            "vllm": vllm_version(),
            "packages": packages("moe-optimizer", "torch"),
        },
        "workload": {
            "model": "examples/tiny-moe",
            "text": "configs/corpus/code.txt",
            "prompt_tokens": PROMPT_TOKENS,
            "answer_tokens": ANSWER_TOKENS,
            "clients": 1,
        },
        "results": {
            "ratio": ratio_of(pairs),
            "ratio_interval_95": [ratios[int(0.025 * _RESAMPLES)], ratios[int(0.975 * _RESAMPLES)]],
            "median_ms": {side: statistics.median(samples[side]) for side in SIDES},
            "tpot_ms": samples,
            "answers": len(pairs),
            "equal_answers": equal,
        },
    }


def ratio_of(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the median of the first over that of the second."""
    return statistics.median(pair[0] for pair in pairs) / statistics.median(pair[1] for pair in pairs)


def show(record: dict[str, Any]) -> None:
    """Print what was found."""
    results, drafts = record["results"], record["drafts"]
    low, high = results["ratio_interval_95"]
    print(f"TPOT {results['median_ms']['off']:.2f} ms without drafts, {results['median_ms']['on']:.2f} ms with")
    print(f"{results['ratio']:.2f}x ({low:.2f} to {high:.2f})")
    print(f"{drafts['accepted_tokens']:.0f} of {drafts['draft_tokens']:.0f} drafts accepted")
    print(f"{results['equal_answers']} of {results['answers']} answers equal")


if __name__ == "__main__":
    sys.exit(main())
