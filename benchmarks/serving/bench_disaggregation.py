"""Measures the time between two tokens with and without disaggregation, while others send long prompts.

One server, and prefill and decode servers behind a router, both as planned for this machine, with a small model of
made-up weights. An answer is streamed alone, and once more while long prompts arrive one after the other. The two
sides are asked in turn, never at once, and which of them is first changes in every round; whoever is not asked is idle.
A sample is the time between two tokens of the streamed answer, and the time that a long prompt waits for its first one.

On few cores this shows the cost, not the use: both servers share the cores that the one server has to itself.

Run it on a quiet machine:  python benchmarks/serving/bench_disaggregation.py --write
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_slug, head, host, parser_of, write_record  # noqa: E402
from benchmarks.serving.completions import streamed  # noqa: E402
from benchmarks.serving.dummy_model import write_dummy_model  # noqa: E402
from benchmarks.serving.plans import plan_here, vllm_version  # noqa: E402
from moe_optimizer.launcher.launch import ServerInfo, running  # noqa: E402
from moe_optimizer.plan.decision import Wish  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402

SHAPE = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 4}
"""Of the model; the rest is the bundled one's, whose steps are so short that the time of a token gets lost between the
processes that hand it on."""
PASS = "disaggregation"
MODEL_LEN = 2048
SHORT, LONG = 16, 1500
"""Tokens of the prompts."""
READY_TIMEOUT_S = 600.0
QUANTILES = (0.5, 0.9, 0.99)
GROUP_PORTS = 4
"""Of the router, its metrics and the two servers."""
SIDES = ("one server", "prefill and decode")
SEED = 20261120


@dataclass
class Seen:
    """Seconds, a list for each round."""

    between_tokens: dict[str, list[list[float]]] = field(default_factory=lambda: {"quiet": [], "long prompts": []})
    first_token: list[list[float]] = field(default_factory=list)
    """Of the long prompts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and with --write store the record."""
    parser = parser_of(__doc__, write=True)
    parser.add_argument("--rounds", type=int, default=6, help="rounds (default: 6)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of a streamed answer (default: 100)")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds before each long prompt (default: 0.2)")
    options = parser.parse_args(arguments)

    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), first_free_port(1 + GROUP_PORTS)
        model = write_dummy_model(folder / "model", SHAPE)
        one, group = plan_of(model, port, split=False), plan_of(model, port + 1, split=True)
        with (
            running(one, run_dir=folder / "one", ready_timeout_s=READY_TIMEOUT_S) as single,
            running(
                group, run_dir=folder / "group", require=frozenset({PASS}), ready_timeout_s=READY_TIMEOUT_S
            ) as divided,
        ):
            seen = measure(dict(zip(SIDES, (single, divided), strict=True)), options)
            (row,) = [row for row in divided.rows if row.pass_name == PASS]
    record = make_record(seen, options, plans=(one, group), ran=row.ran, load_before=load_before)
    show(record["results"])
    if options.write:
        write_record(record, cpu_slug(record["environment"]["cpu"]), PASS)
    return 0


def plan_of(model: Path, port: int, *, split: bool) -> Plan:
    """Return the balanced profile's plan for `model` on this machine."""
    return plan_here(
        model,
        "--load-format",
        "dummy",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        wishes={PASS: (Wish.ON if split else Wish.OFF, "benchmark")},
        dtype="bfloat16",
        port=port,
        max_model_len=MODEL_LEN,
        batch_size=8,
    )


def first_free_port(count: int) -> int:
    """Return the first of `count` ports in a row that nobody listens on."""
    # Below the range from which the kernel takes ports for outgoing connections.
    for first in random.Random(os.getpid()).sample(range(20_000, 32_000), 100):
        if not any(_in_use(first + offset) for offset in range(count)):
            return first
    raise RuntimeError(f"no {count} free ports in a row")


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def measure(servers: dict[str, ServerInfo], options: argparse.Namespace) -> dict[str, Seen]:
    """Return what was seen of each side, after one uncounted round."""
    rng = random.Random(SEED)
    seen = {side: Seen() for side in servers}
    for round_idx in range(-1, options.rounds):
        for side in SIDES if round_idx % 2 else SIDES[::-1]:
            counted = seen[side] if round_idx >= 0 else Seen()
            ask_once(servers[side], counted, options, rng)
    if not all(any(each.first_token) for each in seen.values()):
        sys.exit(
            f"--tokens {options.tokens}: the answers ended before a long prompt came\n"
            f"hint: more tokens, or a --pause under {options.pause:g}"
        )
    return seen


def ask_once(server: ServerInfo, seen: Seen, options: argparse.Namespace, rng: random.Random) -> None:
    """Stream one answer alone, and one while long prompts arrive."""
    seen.between_tokens["quiet"].append(steps_of(arrivals(server, prompt_of(SHORT, rng), options.tokens)))
    done, waits = threading.Event(), []
    # Its own numbers: the streaming thread draws from the other ones.
    long_rng = random.Random(rng.random())

    def interfere() -> None:
        while not done.wait(options.pause):
            prompt = prompt_of(LONG, long_rng)
            sent = time.perf_counter()
            waits.append(next(arrivals(server, prompt, 1))[0] - sent)

    other = threading.Thread(target=interfere)
    other.start()
    try:
        seen.between_tokens["long prompts"].append(steps_of(arrivals(server, prompt_of(SHORT, rng), options.tokens)))
    finally:
        done.set()
        other.join()
    seen.first_token.append(waits)


def prompt_of(length: int, rng: random.Random) -> list[int]:
    """Return token ids that no other prompt begins with."""
    return rng.choices(range(20, 800), k=length)


def arrivals(server: ServerInfo, prompt: list[int], tokens: int) -> Iterator[tuple[float, int]]:
    """Yield when so many tokens had arrived, each time that more had."""
    had = 0
    for chunk in streamed(server.base_url, server.model, prompt, tokens, logprobs=1):
        # The router does not pass on the running count of tokens; the probabilities are one for each.
        new = tokens_in(json.loads(chunk))
        if new:
            had += new
            yield time.perf_counter(), had
    if had != tokens:
        raise RuntimeError(f"got {had} tokens, expected {tokens}")


def tokens_in(chunk: dict[str, Any]) -> int:
    """Return how many tokens a chunk of a stream brings."""
    if "choices" not in chunk:
        raise RuntimeError(f"expected a completion, got {str(chunk)[:300]}")
    return sum(len(choice["logprobs"]["tokens"]) for choice in chunk["choices"] if choice.get("logprobs"))


def steps_of(seen: Iterator[tuple[float, int]]) -> list[float]:
    """Return the seconds from one token to the next; of several that come together the first has waited for all."""
    steps = []
    for (before, had), (after, has) in itertools.pairwise(seen):
        steps += [after - before] + [0.0] * (has - had - 1)
    return steps


def results_of(seen: dict[str, Seen]) -> dict[str, Any]:
    """Return quantiles over all rounds and every sample, in milliseconds, by side."""
    results: dict[str, Any] = {}
    for side, each in seen.items():
        results[side] = {
            "between_tokens_ms": {
                when: quantiles(rounds) | {"samples": in_ms(rounds)} for when, rounds in each.between_tokens.items()
            },
            "first_token_of_long_prompts_ms": quantiles(each.first_token) | {"samples": in_ms(each.first_token)},
        }
    return results


def quantiles(rounds: list[list[float]]) -> dict[str, Any]:
    """Return quantiles and the maximum in milliseconds; of each round's median the smallest and largest too."""
    together = sorted(1e3 * seconds for each in rounds for seconds in each)
    medians = [1e3 * statistics.median(each) for each in rounds if each]
    picked = {f"p{round(100 * share)}": together[min(len(together) - 1, int(share * len(together)))]
              for share in QUANTILES}  # fmt: skip
    return picked | {"max": together[-1], "round_medians": [min(medians), max(medians)]}


def in_ms(rounds: list[list[float]]) -> list[list[float]]:
    """Return samples in milliseconds, rounded to a microsecond."""
    return [[round(1e3 * seconds, 3) for seconds in each] for each in rounds]


def show(results: dict[str, Any]) -> None:
    """Print a table."""
    for side, result in results.items():
        for when, row in result["between_tokens_ms"].items():
            print(f"{side:<19} {when:<13} between tokens  {in_words(row)}")
        print(f"{side:<19} {'long prompts':<13} their first     {in_words(result['first_token_of_long_prompts_ms'])}")


def in_words(row: dict[str, Any]) -> str:
    """Return quantiles as text."""
    return ", ".join(f"{name} {row[name]:8.2f} ms" for name in ("p50", "p90", "p99", "max"))


def make_record(
    seen: dict[str, Seen], options: argparse.Namespace, *, plans: tuple[Plan, Plan], ran: str, load_before: float
) -> dict[str, Any]:
    """Return the record: what was run, where, every sample."""
    return {
        **head("time between the tokens of an answer while long prompts arrive: one server against prefill and decode"),
        "environment": {**host(load_before), "vllm": vllm_version()},
        "workload": {
            "model": SHAPE | {"dtype": "bfloat16", "weights": "dummy", "compiled": False},
            "answer": {"prompt": SHORT, "tokens": options.tokens},
            "long_prompts": {"prompt": LONG, "tokens": 1, "pause_s": options.pause},
            "rounds": options.rounds,
            "seed": SEED,
        },
        "plans": dict(zip(SIDES, (plan.digest for plan in plans), strict=True)),
        "proof": {PASS: ran},
        "results": results_of(seen),
    }


if __name__ == "__main__":
    sys.exit(main())
