"""The engine on a GPU beside vLLM, if that is installed: nano-vLLM's workload, and decode steps of one and 64 requests.

    python benchmarks/engine/gpu_throughput.py --write [--only nano|decode] [--commit HASH] [--quick]

nano: 256 requests of 100 to 1024 prompt tokens and 100 to 1024 output tokens, the shape of Qwen3-0.6B. decode: the
shape of Qwen3-30B-A3B, time per output token of 1 and 64 requests with 512 tokens before. Weights are random, so
routing is near uniform. Each side runs in a process of its own, and some of its requests before they are timed. Prints
JSON; --write stores it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engine.own_process import in_own_process  # noqa: E402
from benchmarks.engine.workload import Request, model_folder, peak_bytes, random_requests  # noqa: E402
from benchmarks.record import gpu_environment, head, packages, parser_of, write_record  # noqa: E402

TURNS = 3
DECODE_TOKENS = 128
CONTEXT = 512


def main() -> None:
    """Measure every side of every workload, print, and with --write store a record."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--only", choices=("nano", "decode"))
    parser.add_argument("--sides", default="engine,vllm")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, one turn: to see that it runs")
    args = parser.parse_args()
    import torch

    results: dict[str, Any] = {}
    for workload in ("nano", "decode") if args.only is None else (args.only,):
        results[workload] = {}
        for side in args.sides.split(","):
            try:
                results[workload][side] = in_own_process(_measure, side, workload, quick=args.quick)
            except RuntimeError as error:
                # What the other sides found is kept.
                results[workload][side] = {"error": str(error)}
    installed = [name for name in ("torch", "triton", "vllm", "transformers") if _version(name)]
    record = {
        **head("the embedded engine and vLLM on one GPU, the same random weights' shapes and requests", args.commit),
        "environment": {**gpu_environment(), "packages": packages(*installed)},
        "quick": args.quick,
        "results": results,
    }
    print(json.dumps(record, indent=1))
    if args.write:
        write_record(record, torch.cuda.get_device_name().split()[1].lower(), "engine_throughput")


def _version(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def _measure(side: str, workload: str, *, quick: bool) -> dict[str, Any] | None:
    """Return what one side needed; None if it is not installed."""
    if side == "vllm" and not _version("vllm"):
        return None
    shape = {"nano": "qwen3-0.6b", "decode": "qwen3-30b-a3b"}[workload]
    with tempfile.TemporaryDirectory() as folder:
        name, load_format = model_folder(shape, Path(folder))
        started = time.perf_counter()
        values = {"max_model_len": 4096, "max_num_batched_tokens": 16384, "load_format": load_format}
        if side == "vllm":
            from vllm import LLM, SamplingParams
        else:
            from moe_optimizer.engine import LLM, SamplingParams
        llm: Any = LLM(name, skip_tokenizer_init=True, max_num_seqs=256, enable_prefix_caching=False, **values)
        ready_s = time.perf_counter() - started

        def run(requests: list[Request], temperature: float) -> float:
            params = [
                SamplingParams(temperature=temperature, max_tokens=each.num_output, ignore_eos=True, detokenize=False)
                for each in requests
            ]
            begun = time.perf_counter()
            llm.generate([{"prompt_token_ids": each.prompt} for each in requests], params, use_tqdm=False)
            return time.perf_counter() - begun

        measured = _nano(run, quick=quick) if workload == "nano" else _decode(run, quick=quick)
        return {"ready_s": ready_s, **measured, "peak_bytes": peak_bytes() if side == "engine" else None}


def _nano(run: Any, *, quick: bool) -> dict[str, Any]:
    requests = random_requests(25 if quick else 256, (100, 1024), (100, 1024), 10000)
    tokens = sum(each.num_output for each in requests)
    run(requests[:16], 0.6)
    samples = [run(requests, 0.6) for _ in range(1 if quick else TURNS)]
    return {"output_tokens": tokens, "seconds": samples, "output_tokens_per_s": tokens / statistics.median(samples)}


def _decode(run: Any, *, quick: bool) -> dict[str, Any]:
    """Time per output token: the difference of a long and a short output, so that the prompts cancel."""
    found: dict[str, Any] = {}
    for batch in (1, 64):
        prompts = [each.prompt for each in random_requests(batch, (CONTEXT, CONTEXT), (1, 1), 10000)]
        run([Request(prompt, 8) for prompt in prompts], 0.0)
        samples = []
        for _ in range(1 if quick else TURNS):
            short = run([Request(prompt, 8) for prompt in prompts], 0.0)
            long = run([Request(prompt, 8 + DECODE_TOKENS) for prompt in prompts], 0.0)
            samples.append((long - short) / DECODE_TOKENS * 1e3)
        found[f"ms_per_token_at_{batch}"] = {"median": statistics.median(samples), "samples": samples}
    return found


if __name__ == "__main__":
    main()
