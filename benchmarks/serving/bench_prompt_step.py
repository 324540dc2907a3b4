"""Writes the ledger of a step that reads one prompt: time per group of kernels, and the wall time that is none of them.

    python benchmarks/serving/bench_prompt_step.py (--model DIR | --shape NAME) --out FILE
        [--prompts 128,512,2048,4096,8192] [--rounds 5] [-- further vllm serve arguments]

Stock vLLM on one GPU, its engine in this process: HTTP and the tokenizer are not in it. What a served record's time to
first token has beyond the wall time here is theirs. The record is written after each length of prompt.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import gpu_environment, head, parser_of  # noqa: E402
from benchmarks.serving.dummy_model import published_shapes, write_published_shape  # noqa: E402
from moe_optimizer.files import write_atomically  # noqa: E402
from moe_optimizer.measure.decode_step.kernel_groups import group_of  # noqa: E402
from moe_optimizer.measure.decode_step.profiled_steps import engine_of, kernel_times  # noqa: E402

STEP_TOKENS = 8192
"""vLLM's default on a GPU with much memory: so many tokens of prompts are read in a step."""


def main() -> int:
    """Read prompts of each length and write the record."""
    parser = parser_of(__doc__, commit=True)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model")
    model.add_argument("--shape", choices=published_shapes(), metavar="NAME", help="for example qwen3_moe")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", default="128,512,2048,4096,8192")
    parser.add_argument("--rounds", type=int, default=5)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, serve_args = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    environment = gpu_environment()
    if not environment["gpus"]:
        parser.error("no GPU was found here; its kernels are what is profiled")
    lengths = [int(each) for each in options.prompts.split(",")]
    # Without it vLLM would start the engine in a process that no profiler here sees.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    record: dict[str, Any] = {
        **head("where the time of a step goes that reads one prompt: wall time, and kernels by group", options.commit),
        "environment": environment,
        "model": options.shape or Path(options.model).name,
        "rounds": options.rounds,
        "prompts": {},
    }
    with tempfile.TemporaryDirectory(prefix="prompts-") as folder:
        if options.shape:
            options.model = str(write_published_shape(Path(folder) / options.shape, options.shape))
            serve_args += ["--load-format", "dummy"]
        sizes = ("--max-num-batched-tokens", str(STEP_TOKENS), "--max-model-len", str(max(lengths) + 16))
        engine = engine_of(options.model, [*sizes, "--no-enable-prefix-caching", *serve_args])
        for length in lengths:
            found = record["prompts"][str(length)] = measured(engine, length, options.rounds)
            write_atomically(options.out, json.dumps(record, indent=1) + "\n")
            groups = ", ".join(f"{group} {each['us']:.0f}" for group, each in found["groups"].items())
            print(f"{length:>6} tokens: {found['us']:.0f} us; kernels {found['kernels_us']:.0f}: {groups}", flush=True)
    return 0


def measured(engine: Any, length: int, rounds: int) -> dict[str, Any]:
    """Return the wall time of reading a prompt of so many tokens, and its kernels by group."""
    import torch

    for number in range(2):  # compile, and fill caches
        read(engine, length, f"{length}-before-{number}")
    samples = [read(engine, length, f"{length}-{number}") for number in range(rounds)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for number in range(rounds):
            read(engine, length, f"{length}-profiled-{number}")
    kernels = kernel_times(profiler, rounds)
    groups: dict[str, dict[str, float]] = defaultdict(lambda: {"calls": 0.0, "us": 0.0})
    for kernel in kernels:
        group = groups[group_of(kernel.name)]
        group["calls"], group["us"] = group["calls"] + kernel.calls, round(group["us"] + kernel.us, 2)
    return {
        "us": statistics.median(samples),
        "samples_us": samples,
        "kernels_us": round(sum(kernel.us for kernel in kernels), 1),
        "groups": dict(sorted(groups.items(), key=lambda pair: -pair[1]["us"])),
        "kernels": [{"name": each.name, "calls": each.calls, "us": each.us} for each in kernels[:40]],
    }


def read(engine: Any, length: int, name: str) -> float:
    """Return the us until the engine has answered one token to a prompt that it has not seen."""
    import torch
    from vllm import SamplingParams

    tokens, vocabulary = random.Random(name), engine.model_config.get_vocab_size()
    prompt = {"prompt_token_ids": [tokens.randrange(1, vocabulary) for _ in range(length)]}
    torch.cuda.synchronize()
    begin = time.perf_counter()
    engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    torch.cuda.synchronize()
    return round(1e6 * (time.perf_counter() - begin), 1)


if __name__ == "__main__":
    sys.exit(main())
