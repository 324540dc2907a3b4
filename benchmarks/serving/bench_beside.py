"""Runs `bench` on servers that are up at the same time, which `bench` itself starts one after the other.

    python benchmarks/serving/bench_beside.py --out FILE --side "four-bit DIR +four_bit" --side "stock DIR-INT4"
        [--side "fp8 DIR +fp8 gpus=1"] [--workload benchmarks/serving/served.yaml] [--workload prefill]
        [--repetitions 3] [--warm-up-s 120] [--total-s 560] [-- vllm serve arguments of all sides]

A side is a name, a model's folder, a profile (@FILE; the balanced one by default), passes to switch on (+four_bit) or
off (-flash_dmoe) in it, GPUs of its own (gpus=1 or gpus=2,3), and vllm serve arguments of its own; `stock` is vLLM
without our plugin. A side does not start without what has a +. With ~ (~skinny_gemm) a pass is on and may stay away, as
where a worker times its kernel and finds it no faster: the side's table says so. All start at once and are loaded in
turns: the first beside each of the others, or alone. Sides that share GPUs need shares of the memory
(--kv-cache-memory-bytes, and --gpu-memory-utilization). Sides with GPUs of their own also differ as those do: change
them over to see by how much. The record is written when the servers are up or have failed, and after each bench.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import gpu_environment, head, parser_of  # noqa: E402
from benchmarks.serving.any_lengths import drive  # noqa: E402
from benchmarks.serving.plans import free_port, plan_here, served  # noqa: E402
from benchmarks.serving.together import started  # noqa: E402
from moe_optimizer.cli.main import main as moe_optimizer  # noqa: E402
from moe_optimizer.cli.progress import ProgressLines  # noqa: E402
from moe_optimizer.cli.speed_questions import measure_if_needed  # noqa: E402
from moe_optimizer.errors import MoeOptimizerError  # noqa: E402
from moe_optimizer.files import write_atomically  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds  # noqa: E402
from moe_optimizer.launcher.compile_caches import compile_caches  # noqa: E402
from moe_optimizer.launcher.warm_up import DEFAULT_LIMIT_S  # noqa: E402
from moe_optimizer.measure.bench.result import RESULT_FILE  # noqa: E402
from moe_optimizer.measure.bench.side import STOCK, RunningSide, Side  # noqa: E402
from moe_optimizer.passes.registry import PASS_NAMES  # noqa: E402
from moe_optimizer.plan.decision import Wish  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.process_environment import changed_environment  # noqa: E402
from moe_optimizer.profiles import load_profile  # noqa: E402

DEFAULT_WORKLOAD = "benchmarks/serving/served.yaml"
GPUS = "gpus="
CALIBRATE_S = 30.0
LEAST_S = 30.0
"""With less time left no bench begins."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """What the command line says of a side."""

    name: str
    model: str
    profile: str
    wishes: dict[str, Wish]
    """Pass -> on or off."""
    required: frozenset[str]
    """Those without which it does not start."""
    gpus: str | None
    """The GPUs it alone has, as CUDA_VISIBLE_DEVICES names them; None: those of all sides."""
    vllm_args: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that its plan is made and its server is started with."""
        return {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus}


def words_of(text: str) -> Words:
    """Return what a side is made of."""
    name, model, *rest = shlex.split(text)
    profiles = [word for word in rest if word[0] == "@"]
    gpus = [word for word in rest if word.startswith(GPUS)]
    switches = [word for word in rest if word[0] in "+~-" and word[1:] in PASS_NAMES]
    if unknown := [word for word in rest if word[0] in "+~" and word not in switches]:
        raise argparse.ArgumentTypeError(f"got {unknown}, expected + or ~ before one of {PASS_NAMES}")
    return Words(
        name=name,
        model=model,
        profile=profiles[-1][1:] if profiles else "balanced",
        wishes={word[1:]: Wish.OFF if word[0] == "-" else Wish.ON for word in switches},
        required=frozenset(word[1:] for word in switches if word[0] == "+"),
        gpus=gpus[-1].removeprefix(GPUS) if gpus else None,
        vllm_args=tuple(word for word in rest if word not in (*switches, *profiles, *gpus)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Start all sides, run every bench, write the record."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--side", type=words_of, action="append", required=True, dest="sides")
    parser.add_argument("--workload", action="append", dest="workloads", help=f"(default: {DEFAULT_WORKLOAD})")
    parser.add_argument("--clients", action="append", help="of every workload; given again: of a bench of its own")
    parser.add_argument("--first-s", type=float, default=0.0, help="prompts of any length for so long before the first")
    parser.add_argument(
        "--warm-up-s", type=float, default=DEFAULT_LIMIT_S, help="the most of a server's warm-up, in turns"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--run-dir", type=Path, help="for logs and samples (default: a temporary folder)")
    parser.add_argument("--total-s", type=float, default=560.0, help="no bench begins after so long")
    options = parser.parse_args(words[:at])
    if options.repetitions < 2:
        parser.error(f"--repetitions: got {options.repetitions}, expected 2 or more: `bench` takes no fewer")
    end = time.monotonic() + options.total_s
    record: dict[str, Any] = {
        **head(
            "`bench` on servers that were up at the same time and loaded in turns; weights are random where vLLM was "
            "told to (--load-format dummy)",
            options.commit,
        ),
        "environment": gpu_environment(),
        "sides": {},
        "not_started": {},
        "benches": [],
        "not_measured": [],
    }

    def keep() -> None:
        write_atomically(options.out, json.dumps(record, indent=1) + "\n")

    sides = planned(options.sides, options.batch_size, words[at + 1 :], record["not_started"])
    keep()
    if not sides:
        return 1
    with contextlib.ExitStack() as stack:
        folder = options.run_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        assert sides[0].plan is not None, sides[0]
        # `bench` and the servers look into the same folders for what was compiled.
        os.environ.update(compile_caches(sides[0].plan, os.environ))
        own = {each.name: each for each in options.sides}
        ready_s = max(LEAST_S, end - time.monotonic() - LEAST_S)
        up = stack.enter_context(
            started(
                sides, folder, ready_s, record["not_started"], warm_up_s=options.warm_up_s,
                environments={name: each.environment for name, each in own.items()},
            )
        )  # fmt: skip
        record["sides"] = {
            side.name: about(side, up[side.name]) | {"gpus": own[side.name].gpus} for side in sides if side.name in up
        }
        keep()
        if options.first_s:
            known = {side.name: side.plan.model.vocab_size for side in sides if side.plan is not None}
            drive(
                [(each.base_url, each.model, known[name], each.max_model_len) for name, each in up.items()],
                options.first_s,
            )
        asked = benches_of(list(up), options.workloads or [DEFAULT_WORKLOAD], options.clients or [None])
        for number, (names, workload, clients) in enumerate(asked):
            title = f"{' and '.join(names)}, {workload}, {clients or 'its'} clients"
            if time.monotonic() + LEAST_S > end:
                record["not_measured"].append(f"{title}: the time was over")
            elif found := bench(
                folder / f"bench-{number}", options, workload, clients, {name: up[name] for name in names}
            ):
                record["benches"].append(found)
            else:
                record["not_measured"].append(f"{title}: bench failed")
            keep()
    return 0 if record["benches"] and not record["not_started"] else 1


def planned(sides: Sequence[Words], batch_size: int, vllm_args: Sequence[str], failed: dict[str, str]) -> list[Side]:
    """Return the sides that have a plan; `failed` gets the names of the others, and why there is none."""
    found = []
    for words in sides:
        try:
            found.append(side_of(words, batch_size, vllm_args))
        except MoeOptimizerError as error:
            failed[words.name] = str(error)
            print(f"{words.name}: {error}", flush=True)
    return found


def side_of(words: Words, batch_size: int, vllm_args: Sequence[str]) -> Side:
    """Return a side with the plan that it is served by.

    vLLM alone has as many requests and tokens in a step as the others, and nothing else.
    """
    asked = words.wishes
    if words.name == STOCK:
        asked = dict.fromkeys(PASS_NAMES, Wish.OFF) | {"scheduler": Wish.ON}

    def plan(**more: Any) -> Plan:
        return plan_here(
            words.model, *vllm_args, *words.vllm_args, kernel_speeds=read_kernel_speeds(),
            profile=load_profile(words.profile), batch_size=batch_size, port=free_port(),
            wishes={name: (wish, "this benchmark") for name, wish in asked.items()}, **more,
        )  # fmt: skip

    with changed_environment(words.environment):
        # What no table answers is measured first, as `serve` does: required kernels would be refused without.
        measure_if_needed(plan(will_measure=True), CALIBRATE_S, ProgressLines(verbose=True))
        return Side(name=words.name, plan=plan(required=words.required))


def about(side: Side, running: RunningSide) -> dict[str, Any]:
    """Return what a record says of a side."""
    assert side.plan is not None, side
    assert running.info is not None, side
    return {"ready_s": running.ready_s, **served(side.plan, running.info, PASS_NAMES)}


def benches_of(
    names: Sequence[str], workloads: Sequence[str], clients: Sequence[str | None]
) -> list[tuple[tuple[str, ...], str, str | None]]:
    """Return sides, workload and clients of each bench: the first side beside each of the others, or alone."""
    pairs = [(names[0], other) for other in names[1:]] or [tuple(names)]
    return [(pair, workload, each) for workload in workloads for each in clients for pair in pairs if pair]


def bench(
    folder: Path, options: Any, workload: str, clients: str | None, sides: dict[str, RunningSide]
) -> dict[str, Any] | None:
    """Return the result of one `bench` of one side or two, by their names; None if it failed."""
    urls = [each.base_url for each in sides.values()]
    code = moe_optimizer(
        [
            *("bench", options.sides[0].model, "--plan", urls[0], "--against", *(urls[1:] or [""])),
            *("--workload", workload, "--repetitions", str(options.repetitions), "--run-dir", str(folder)),
            *(("--clients", clients) if clients else ()),
        ]
    )
    if code != 0:
        return None
    found = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    for side, name in zip(found["sides"], sides, strict=True):
        side["name"] = name
    return {key: found[key] for key in ("workload", "description", "repetitions", "sides", "verdicts")}


if __name__ == "__main__":
    sys.exit(main())
