"""The engine on a GPU beside vLLM, if that is installed: nano-vLLM's workload, and decode steps of one and 64 requests.

    python benchmarks/engine/gpu_throughput.py --out FILE [--only nano|decode] [--sides engine,vllm,vllm-plugin]

nano: 256 requests of 100 to 1024 prompt tokens and 100 to 1024 output tokens, the shape of Qwen3-0.6B. decode: the
shape of Qwen3-30B-A3B, time per output token of 1 and 64 requests with 512 tokens before. Weights are random, so
routing is near uniform. vllm-plugin is vLLM with our profile "balanced". Each side runs in a process of its own, and
some of its requests before they are timed. The record is written after each side, so what was found stays when a later
one fails; a FILE that is there is continued.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engine.own_process import in_own_process  # noqa: E402
from benchmarks.engine.workload import Request, model_folder, peak_bytes, random_requests  # noqa: E402
from benchmarks.record import gpu_environment, head, packages, parser_of  # noqa: E402

TURNS = 3
DECODE_TOKENS = 128
CONTEXT = 512


def main() -> None:
    """Measure every side of every workload, and write the record after each."""
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--out", type=Path, required=True, help="the record")
    parser.add_argument("--only", choices=("nano", "decode"))
    parser.add_argument("--sides", default="engine,vllm")
    parser.add_argument("--limit-s", type=float, default=175, help="of one side of one workload, its start included")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, one turn: to see that it runs")
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(args.out.read_text())["results"] if args.out.exists() else {}
    for workload in ("nano", "decode") if args.only is None else (args.only,):
        for side in args.sides.split(","):
            try:
                found = in_own_process(_measure, side, workload, limit_s=args.limit_s, quick=args.quick)
            except RuntimeError as error:
                found = {"error": str(error)}
            print(json.dumps({workload: {side: found}}), flush=True)
            results.setdefault(workload, {})[side] = found
            _write(args, results)


def _write(args: Any, results: dict[str, Any]) -> None:
    installed = {each.metadata["Name"] for each in metadata.distributions()}
    versions = packages(*sorted(installed & {"torch", "triton", "vllm", "transformers"}))
    record = {
        **head("the embedded engine and vLLM on one GPU, the same random weights' shapes and requests", args.commit),
        "environment": {**gpu_environment(), "packages": versions},
        "quick": args.quick,
        "results": results,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _measure(side: str, workload: str, *, quick: bool) -> dict[str, Any]:
    """Return what one side needed."""
    if side == "vllm-plugin":
        os.environ["MOE_OPTIMIZER_PROFILE"] = "balanced"
    shape = {"nano": "qwen3-0.6b", "decode": "qwen3-30b-a3b"}[workload]
    with tempfile.TemporaryDirectory() as folder:
        name, load_format = model_folder(shape, Path(folder))
        started = time.perf_counter()
        values = {"max_model_len": 4096, "max_num_batched_tokens": 16384, "load_format": load_format}
        if side.startswith("vllm"):
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
