"""Tokens per second of the embedded engine beside transformers, on one workload with random lengths and a fixed seed.

    python benchmarks/engine/throughput.py examples/tiny-moe --num-requests 64 --dtype float32 [--write]

The engines take turns, so that what else the machine does meets all of them. Prints JSON; --write stores it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engine.workload import Request, random_requests  # noqa: E402
from benchmarks.record import cpu_name, cpu_slug, head, host, packages, parser_of, write_record  # noqa: E402
from moe_optimizer.engine import LLM, SamplingParams  # noqa: E402


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("model")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, nargs=2, default=(16, 128), metavar=("LEAST", "MOST"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(16, 128), metavar=("LEAST", "MOST"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only-engine", action="store_true")
    args = parser.parse_args()

    load_before = os.getloadavg()[0]
    llm = LLM(args.model, dtype=args.dtype, enable_prefix_caching=False)
    vocab_size = llm.llm_engine.config.hf_config.vocab_size
    requests = random_requests(args.num_requests, args.input_len, args.output_len, vocab_size)
    runs: dict[str, Callable[[list[Request]], None]] = {"engine": lambda some: _engine(llm, some)}
    if not args.only_engine:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
        runs["transformers_one_by_one"] = lambda some: _one_by_one(model, some)
        runs["transformers_batched"] = lambda some: _batched(model, some)
    for run in runs.values():
        run(requests[:4])
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.turns):
        for name, run in runs.items():
            started = time.perf_counter()
            run(requests)
            samples[name].append(sum(count for _, count in requests) / (time.perf_counter() - started))
    medians = {name: round(statistics.median(values), 1) for name, values in samples.items()}
    ratios = {
        f"engine / {name}": round(medians["engine"] / each, 2) for name, each in medians.items() if name != "engine"
    }
    record = {
        **head("output tokens per second of the embedded engine and of transformers on the same requests", args.commit),
        "environment": {**host(load_before), "packages": packages("torch", "transformers")},
        "workload": {name: value for name, value in vars(args).items() if name not in ("write", "commit")},
        "output_tokens_per_s": medians,
        "ratios": ratios,
        "samples": samples,
    }
    print(json.dumps(record))
    if args.write:
        write_record(record, cpu_slug(cpu_name()), f"engine_throughput_{Path(args.model).name}")


def _engine(llm: LLM, requests: list[Request]) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests]
    llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)


def _one_by_one(model: Any, requests: list[Request]) -> None:
    for prompt, count in requests:
        _generate(model, torch.tensor([prompt]), None, count)


def _batched(model: Any, requests: list[Request]) -> None:
    """All at once, prompts padded on the left, until the longest output is there."""
    longest = max(len(prompt) for prompt, _ in requests)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    _generate(model, ids, mask, max(count for _, count in requests))


def _generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, count: int) -> None:
    model.generation_config.eos_token_id = None
    model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=count, temperature=None, top_p=None)


if __name__ == "__main__":
    main()
