"""Where a decode step of the embedded engine goes on a GPU, and what its attention reads in how long.

    python benchmarks/engine/gpu_decode_step.py --out FILE [--model qwen3-0.6b] [--batches 256 128 32] [--no-sweep]

steps: for each number of requests (100 to 1024 prompt tokens each, as nano-vLLM's workload has them) the time of a step
as the host sees it, the time in which the GPU computed, by kernel, and what is left: the GPU waits for the host.
sweep: the attention kernel of Triton alone, in a CUDA graph, on contexts of 100 to 2048 tokens, in bytes of keys and
values per second: as it is launched, with the longest sequences first, and with other tiles, warps, stages and parts.
The memory's own read bandwidth, a sum over 4 GiB, stands beside it. The record is written after each result.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.engine.workload import SHAPES, model_folder, random_requests  # noqa: E402
from benchmarks.record import gpu_environment, head, packages, parser_of  # noqa: E402
from moe_optimizer.files import write_atomically  # noqa: E402

STEPS = 20
FIRST_STEPS = 40
SHOWN_KERNELS = 20
BLOCK_SIZE = 16
CALLS = 20
"""Of the attention in one graph, each on a cache of its own place in memory, so that none is read from the L2 cache."""


def main() -> None:
    """Measure, and write the record after each result."""
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--out", type=Path, required=True, help="the record")
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape of workload.py")
    parser.add_argument("--batches", type=int, nargs="+", default=(256, 128, 32))
    parser.add_argument("--no-sweep", action="store_true")
    args = parser.parse_args()
    record: dict[str, Any] = {
        **head("decode steps of the embedded engine on one GPU, by kernel", args.commit),
        "environment": {**gpu_environment(), "packages": packages("torch", "triton")},
        "model": args.model,
        "read_bandwidth_bytes_per_s": _read_bandwidth(),
        "steps": [],
        "sweep": [],
    }

    def keep(part: str, found: dict[str, Any]) -> None:
        record[part].append(found)
        print(json.dumps({part: found}), flush=True)
        write_atomically(args.out, json.dumps(record, indent=1) + "\n")

    if not args.no_sweep:
        for batch in args.batches:
            for found in _sweep(SHAPES[args.model], batch):
                keep("sweep", found)
        torch.cuda.empty_cache()
    for found in _steps(args.model, args.batches):
        keep("steps", found)


def _read_bandwidth() -> float:
    large = torch.ones(1 << 30, device="cuda")
    times = [_timed(large.sum) for _ in range(6)]
    return large.nbytes / min(times)


def _timed(call: Any) -> float:
    """Return the seconds of a call on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def _steps(model: str, batches: Any) -> Any:
    """Yield the ledger of a step for each number of requests, the engine's start once."""
    from moe_optimizer.engine import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        path, load_format = model_folder(model, Path(folder))
        engine = LLM(
            path, load_format=load_format, skip_tokenizer_init=True, max_num_seqs=max(batches), max_model_len=4096,
            max_num_batched_tokens=16384, enable_prefix_caching=False,
        ).llm_engine  # fmt: skip
    for batch in batches:
        requests = random_requests(batch, (100, 1024), (1, 1), 10000)
        params = SamplingParams(temperature=0.6, max_tokens=1024, ignore_eos=True, detokenize=False)
        for number, request in enumerate(requests):
            engine.add_request(str(number), {"prompt_token_ids": request.prompt}, params)
        for _ in range(FIRST_STEPS):
            engine.step()
        times = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begun)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(STEPS):
                engine.step()
            torch.cuda.synchronize()
        kernels = [each for each in profile.key_averages() if each.self_device_time_total > 0]
        kernels.sort(key=lambda each: -each.self_device_time_total)
        busy_ms = sum(each.self_device_time_total for each in kernels) / 1e3 / STEPS
        tokens = sum(len(request.prompt) for request in requests) + batch * (FIRST_STEPS + 2 * STEPS)
        for number in range(batch):
            engine.abort_request(str(number))
        step_ms = statistics.median(times) * 1e3
        yield {
            "batch": batch,
            "context_tokens": tokens,
            "step_ms": step_ms,
            "gpu_busy_ms": busy_ms,
            "gpu_idle_ms": step_ms - busy_ms,
            "kernels": [
                {"name": each.key[:120], "ms": each.self_device_time_total / 1e3 / STEPS, "calls": each.count / STEPS}
                for each in kernels[:SHOWN_KERNELS]
            ],
        }


def _sweep(shape: dict[str, Any], batch: int) -> Any:
    """Yield what the attention kernel reads per second, launched in several ways."""
    from moe_optimizer.engine.attention import triton_attention

    kernels: Any = triton_attention
    names = ("TILE_KEYS", "PROGRAMS_PER_CORE", "WARPS", "STAGES")
    shipped = tuple(getattr(kernels, name) for name in names)
    read = _attention_calls(shape, batch)
    yield {"batch": batch, "longest_first": True, **_attention_calls(shape, batch, longest_first=True)()}
    ways = list(itertools.product((64, 32, 128), (2, 8, 32), (4, 2, 8), (3, 2, 4)))
    # One thing changed at a time, and tiles with fewer or more stages.
    changed: list[list[bool]] = [[one != other for one, other in zip(way, shipped, strict=True)] for way in ways]
    for way, differs in zip(ways, changed, strict=True):
        if sum(differs) > 1 and (differs[1] or differs[2]):
            continue
        found = {"batch": batch, **dict(zip(names, way, strict=True))}
        try:
            for name, value in zip(names, way, strict=True):
                setattr(kernels, name, value)
            yield {**found, **read()}
        except Exception as error:  # noqa: BLE001  (too much shared memory, say: the other ways are still of interest)
            yield {**found, "error": f"{type(error).__name__}: {error}"[:200]}
        finally:
            for name, value in zip(names, shipped, strict=True):
                setattr(kernels, name, value)


def _attention_calls(shape: dict[str, Any], batch: int, *, longest_first: bool = False) -> Any:
    """Return a function that times the decodes of `batch` sequences, CALLS layers of it in one CUDA graph."""
    from moe_optimizer.engine.attention.triton_attention import TritonAttention
    from moe_optimizer.engine.packed_batch import PackedBatch

    heads, kv_heads, size = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    rng = random.Random(0)
    lengths = [rng.randint(100, 2048) for _ in range(batch)]
    if longest_first:
        lengths.sort(reverse=True)
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    blocks = list(range(sum(counts)))
    rng.shuffle(blocks)
    tables = torch.zeros((batch, max(counts)), dtype=torch.int32)
    for row, count in zip(tables, counts, strict=True):
        row[:count] = torch.tensor([blocks.pop() for _ in range(count)], dtype=torch.int32)
    device = torch.device("cuda")
    caches = [
        torch.randn((2, sum(counts), BLOCK_SIZE, kv_heads, size), dtype=torch.bfloat16, device=device)
        for _ in range(2 if batch > 16 else CALLS)
    ]
    q = torch.randn((batch, heads, size), dtype=torch.bfloat16, device=device)
    k, v = (torch.randn((batch, kv_heads, size), dtype=torch.bfloat16, device=device) for _ in range(2))
    packed = PackedBatch(
        copies=[],
        token_ids_T=torch.zeros(batch, dtype=torch.int64, device=device),
        positions_T=torch.tensor(lengths, device=device) - 1,
        slots_T=torch.full((batch,), -1, device=device),
        block_tables_SN=tables.to(device),
        context_lengths_S=torch.tensor(lengths, device=device),
        query_starts_S1=torch.arange(batch + 1, device=device),
        sampled=torch.arange(batch, device=device),
        num_decodes=batch,
        prefills=(),
        block_size=BLOCK_SIZE,
    )
    read_bytes = sum(lengths) * 2 * kv_heads * size * 2

    def timed() -> dict[str, float]:
        backend = TritonAttention()

        def layers() -> None:
            for _, cache in zip(range(CALLS), itertools.cycle(caches), strict=False):
                backend.attend(q, k, v, cache, packed)

        layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        spent = statistics.median(_timed(graph.replay) for _ in range(7)) / CALLS
        return {"us_per_layer": spent * 1e6, "bytes_per_s": read_bytes / spent}

    return timed


if __name__ == "__main__":
    main()
