"""Share of the machine's read bandwidth that one request's decode steps reach: bytes of weights a token needs, by time.

    python benchmarks/engine/decode_bandwidth.py qwen3-0.6b qwen3-moe-0.3b [--dtype float32] [--write]

Models are folders or shapes of workload.py. The bandwidth is that of the sum of a matrix on huge pages, too large for
the caches, with as many threads. It and the decodes take turns. A share is of the turn's own bandwidth; the best one
divides the fastest step of all turns by the highest bandwidth of all, which other work on the machine disturbs least. A
step reads every weight but the embedding's (one row of it) and, of experts, as many as a token is routed to. KV cache
and activations, a few MB here, do not count.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engine.own_process import in_own_process  # noqa: E402
from benchmarks.engine.workload import model_folder  # noqa: E402
from benchmarks.record import cpu_name, cpu_slug, head, host, packages, parser_of, write_record  # noqa: E402

_STEPS = 32
_WARM_UP = 4
_ROWS, _COLUMNS = 1 << 17, 1 << 11
"""1 GiB in float32."""


def main() -> None:
    """Measure, print, and with --write store a record."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("models", nargs="+", help="folders, or shapes of workload.py")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    results = {Path(name).name: in_own_process(_measure, name, args.dtype, args.turns) for name in args.models}
    record = {
        **head("share of the read bandwidth that the engine's decode steps of one request reach", args.commit),
        "environment": {**host(load_before), "packages": packages("torch")},
        "dtype": args.dtype,
        "load_average_after": os.getloadavg()[0],
        "results": results,
    }
    print(json.dumps(record, indent=1))
    if args.write:
        write_record(record, cpu_slug(cpu_name()), "engine_decode_bandwidth")


def _measure(name: str, dtype: str, turns: int) -> dict[str, Any]:
    import torch

    from moe_optimizer.engine import LLM, SamplingParams
    from moe_optimizer.ops import use_huge_pages

    with tempfile.TemporaryDirectory() as folder:
        path, load_format = model_folder(name, Path(folder))
        llm = LLM(
            path, load_format=load_format, dtype=dtype, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=1
        )
    engine, step_bytes = llm.llm_engine, _bytes_of_a_step(llm)
    large = torch.ones(_ROWS, _COLUMNS)
    use_huge_pages(large)  # as the engine does with what it reads
    bandwidths, step_times, fastest = [], [], float("inf")
    for turn in range(turns + 1):
        begun = time.perf_counter()
        large.sum()
        bandwidth = large.nbytes / (time.perf_counter() - begun)
        params = SamplingParams(temperature=0, max_tokens=_STEPS + _WARM_UP, ignore_eos=True, detokenize=False)
        engine.add_request(str(turn), [1 + turn, 2, 3], params)
        times = []
        while engine.has_unfinished_requests():
            begun = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begun)
        # The first turn warms both up.
        if turn:
            bandwidths.append(bandwidth)
            step_times.append(statistics.median(times[_WARM_UP:]))
            fastest = min(fastest, *times[_WARM_UP:])
    shares = [step_bytes / spent / bandwidth for spent, bandwidth in zip(step_times, bandwidths, strict=True)]
    return {
        "bytes_of_a_step": step_bytes,
        "read_bandwidth_bytes_per_s": bandwidths,
        "step_s": step_times,
        "fastest_step_s": fastest,
        "share": {
            "median": statistics.median(shares),
            "turns": shares,
            "best": step_bytes / fastest / max(bandwidths),
        },
    }


def _bytes_of_a_step(llm: Any) -> int:
    from moe_optimizer.engine.layers.moe import MoE

    model = llm.llm_engine.executor.model
    total = sum(parameter.nbytes for parameter in model.parameters())
    if model.lm_head is not None:
        total -= model.model.embed_tokens.weight.nbytes
    for module in model.modules():
        if isinstance(module, MoE):
            experts = module.experts
            idle = 1 - module.top_k / experts.num_experts
            total -= int(idle * (experts.w13.nbytes + experts.w2.nbytes))
    return total


if __name__ == "__main__":
    main()
