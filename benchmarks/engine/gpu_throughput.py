"""The engine on a GPU beside vLLM, if that is installed: nano-vLLM's workload, and decode steps of one and 64 requests.

    python benchmarks/engine/gpu_throughput.py --out FILE [--only nano|decode] [--sides engine,vllm,...]
        [--gpus 0,1] [--limit-s 280]

nano: 256 requests of 100 to 1024 prompt tokens and 100 to 1024 output tokens, the shape of Qwen3-0.6B. decode: the
shape of Qwen3-30B-A3B, time per output token of 1 and 64 requests with 512 tokens before. Weights are random, so
routing is near uniform. The engine runs as it does by itself and, turn by turn, with a host that waits for the tokens
of a step before it prepares the next: "host_waits" in the record, async_scheduling=False. vllm-plugin is vLLM with our
profile "balanced", which has nothing to do for a dense model; engine-flash and engine-triton are the engine with that
attention, which "engine" chooses itself. Each side runs in a process of its own, and some of its requests before they
are timed. With several GPUs a side of a workload takes the next that is free. The record is written after each sample,
so what was found stays when a later one fails, or the limit of the whole run ends it; a FILE that is there is gone on
with.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engine.own_process import each_of_own_process  # noqa: E402
from benchmarks.engine.workload import Request, model_folder, peak_bytes, random_requests  # noqa: E402
from benchmarks.record import gpu_environment, head, packages, parser_of  # noqa: E402
from moe_optimizer.files import write_atomically  # noqa: E402

Run = Callable[[list[Request], float], float]
"""Requests and a temperature to the seconds that they took."""
TURNS = 3
DECODE_TOKENS = 128
CONTEXT = 512
SHAPE_OF = {"nano": "qwen3-0.6b", "decode": "qwen3-30b-a3b"}


def main() -> None:
    """Measure every side of every workload, and write the record after each sample."""
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--out", type=Path, required=True, help="the record")
    parser.add_argument("--only", choices=tuple(SHAPE_OF))
    parser.add_argument("--sides", default="engine,vllm")
    parser.add_argument("--gpus", default=os.environ.get("CUDA_VISIBLE_DEVICES", "0"), help="as CUDA_VISIBLE_DEVICES")
    parser.add_argument("--limit-s", type=float, default=280, help="of the whole run, the starts included")
    parser.add_argument("--model", help="in place of the workload's shape: a folder, or a shape of workload.py")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, one turn: to see that it runs")
    args = parser.parse_args()
    record = _Record(args)
    free: SimpleQueue[str] = SimpleQueue()
    gpus = args.gpus.split(",")
    for gpu in gpus:
        free.put(gpu)

    def measure(workload: str, side: str) -> None:
        gpu = free.get()
        try:
            if (left_s := record.left_s()) <= 0:
                raise RuntimeError("not begun: the limit was over")
            named = {"model": args.model or SHAPE_OF[workload], "gpu": gpu, "quick": args.quick}
            for found in each_of_own_process(_measure, side, workload, limit_s=left_s, **named):
                record.add(workload, side, found)
        except RuntimeError as error:
            record.add(workload, side, {"error": str(error)})
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus)) as threads:
        for workload in SHAPE_OF if args.only is None else (args.only,):
            for side in args.sides.split(","):
                if (workload, side) != ("nano", "vllm-plugin"):
                    threads.submit(measure, workload, side)


class _Record:
    """What was found so far, in a file."""

    def __init__(self, args: Any) -> None:
        self._path, self._ends = args.out, time.monotonic() + args.limit_s
        self._lock = threading.Lock()
        installed = {each.metadata["Name"] for each in metadata.distributions()}
        versions = packages(*sorted(installed & {"torch", "triton", "vllm", "transformers"}))
        self._fields = {
            **head(
                "the embedded engine and vLLM on one GPU, the same random weights' shapes and requests", args.commit
            ),
            "environment": {**gpu_environment(), "packages": versions},
            "quick": args.quick,
        }
        self._results: dict[str, Any] = json.loads(args.out.read_text())["results"] if args.out.exists() else {}

    def left_s(self) -> float:
        return self._ends - time.monotonic()

    def add(self, workload: str, side: str, found: dict[str, Any]) -> None:
        """Keep what a side has found by now; an error beside it."""
        with self._lock:
            sides = self._results.setdefault(workload, {})
            sides[side] = {**sides.get(side, {}), **found} if "error" in found else found
            print(json.dumps({workload: {side: found}}), flush=True)
            write_atomically(self._path, json.dumps({**self._fields, "results": self._results}, indent=1) + "\n")


def _measure(side: str, workload: str, *, model: str, gpu: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield what one side needed, with more samples each time."""
    # Before torch and vLLM are imported, which look at them then.
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.environ.pop("MOE_OPTIMIZER_PROFILE", None)
    if side == "vllm-plugin":
        os.environ["MOE_OPTIMIZER_PROFILE"] = "balanced"
    with tempfile.TemporaryDirectory() as folder:
        name, load_format = model_folder(model, Path(folder))
        vocab_size = json.loads((Path(name) / "config.json").read_text())["vocab_size"]
        started = time.perf_counter()
        values: dict[str, Any] = {"max_model_len": 4096, "max_num_batched_tokens": 16384, "load_format": load_format}
        if side.startswith("vllm"):
            from vllm import LLM, SamplingParams
        else:
            from moe_optimizer.engine import LLM, SamplingParams

            values["async_scheduling"] = True
            values["attention_backend"] = side.partition("-")[2] or "auto"
        llm: Any = LLM(name, skip_tokenizer_init=True, max_num_seqs=256, enable_prefix_caching=False, **values)
        found: dict[str, Any] = {"gpu": gpu, "ready_s": time.perf_counter() - started}
        yield found

        def run(requests: list[Request], temperature: float) -> float:
            params = [
                SamplingParams(temperature=temperature, max_tokens=each.num_output, ignore_eos=True, detokenize=False)
                for each in requests
            ]
            begun = time.perf_counter()
            llm.generate([{"prompt_token_ids": each.prompt} for each in requests], params, use_tqdm=False)
            return time.perf_counter() - begun

        def waiting_run(requests: list[Request], temperature: float) -> float:
            llm.llm_engine.async_scheduling = False
            try:
                return run(requests, temperature)
            finally:
                llm.llm_engine.async_scheduling = True

        runs: dict[str, Run] = {"": run}
        if side == "engine":
            runs["host_waits"] = waiting_run
        measure = _nano if workload == "nano" else _decode
        for measured in measure(runs, vocab_size, quick=quick):
            found |= measured
            yield found
        if side.startswith("engine"):
            yield {**found, "peak_bytes": peak_bytes()}


def _nano(runs: dict[str, Run], vocab_size: int, *, quick: bool) -> Iterator[dict[str, Any]]:
    requests = random_requests(25 if quick else 256, (100, 1024), (100, 1024), min(10000, vocab_size))
    tokens = sum(each.num_output for each in requests)
    runs[""](requests[:16], 0.6)
    samples: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(1 if quick else TURNS):
        for way, run in runs.items():
            samples[way].append(run(requests, 0.6))
            per_s = tokens / statistics.median(samples[way])
            found = {"output_tokens": tokens, "seconds": samples[way], "output_tokens_per_s": per_s}
            yield {way: found} if way else found


def _decode(runs: dict[str, Run], vocab_size: int, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Time per output token: the difference of a long and a short output, so that the prompts cancel."""
    for batch in (1, 64):
        lengths = (CONTEXT, CONTEXT), (1, 1)
        prompts = [each.prompt for each in random_requests(batch, *lengths, min(10000, vocab_size))]
        runs[""]([Request(prompt, 8) for prompt in prompts], 0.0)
        samples: dict[str, list[float]] = {way: [] for way in runs}
        for _ in range(1 if quick else TURNS):
            for way, run in runs.items():
                short = run([Request(prompt, 8) for prompt in prompts], 0.0)
                long = run([Request(prompt, 8 + DECODE_TOKENS) for prompt in prompts], 0.0)
                samples[way].append((long - short) / DECODE_TOKENS * 1e3)
                name = f"ms_per_token_at_{batch}" + (way and f"_{way}")
                yield {name: {"median": statistics.median(samples[way]), "samples": samples[way]}}


if __name__ == "__main__":
    main()
