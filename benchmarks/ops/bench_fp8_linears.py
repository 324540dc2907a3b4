"""Times one FP8 linear of vLLM on one Hopper GPU: CUTLASS per channel and per block, DeepGEMM per block, beside BF16.

    python benchmarks/ops/bench_fp8_linears.py --out RECORD.json

Attention's two linears of Qwen3-30B-A3B. The times are those of a CUDA graph over 8 copies of the weights, which do not
fit the L2 cache together, and hold the quantisation of the input; medians of 7 replays. `first_s` is the first call,
where DeepGEMM compiles for that number of tokens. Random inputs; nothing is compared.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent), str(ROOT / "benchmarks")]

SHAPES = {"qkv": (5120, 2048), "output": (2048, 4096)}
TOKENS = (1, 8, 16, 64, 128, 256, 512, 2048, 8192)
COPIES = 8


def main() -> int:
    """Measure every shape and number of tokens and write the record."""
    from bench_cuda_timing import device_facts
    from record import head, parser_of

    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [row for name, shape in SHAPES.items() for row in _measured(name, *shape)]
    what = "one FP8 linear of Qwen3-30B-A3B's attention by vLLM's kernels, in us, with the quantisation of its input"
    record = head(what, options.commit) | {"environment": device_facts(), "cases": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _measured(name: str, rows: int, columns: int) -> list[dict[str, Any]]:
    import torch

    torch.manual_seed(0)
    weights = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(COPIES)]
    found = []
    for tokens in TOKENS:
        kernels = _kernels(torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16), weights)
        case: dict[str, Any] = {"linear": name, "shape": [rows, columns], "tokens": tokens, "us": {}, "first_s": {}}
        for kernel, call in kernels.items():
            before = time.perf_counter()
            call(0)
            torch.cuda.synchronize()
            case["first_s"][kernel] = round(time.perf_counter() - before, 3)
            case["us"][kernel] = round(_graph_us(call), 2)
        print(case, flush=True)
        found.append(case)
    return found


def _kernels(x: Any, weights: list[Any]) -> dict[str, Callable[[int], Any]]:
    """Return, by name, what multiplies x with a copy of the weight."""
    import torch
    from fp8_products import cutlass, cutlass_block, deep_gemm, quantised

    channels = [quantised(weight, "channel") for weight in weights]
    blocks = [quantised(weight, "block") for weight in weights]
    return {
        "bf16": lambda copy: torch.mm(x, weights[copy].t()),
        "cutlass_channel": lambda copy: cutlass(x, *channels[copy]),
        "cutlass_block": lambda copy: cutlass_block(x, *blocks[copy]),
        "deep_gemm_block": lambda copy: deep_gemm(x, *blocks[copy]),
    }


def _graph_us(call: Callable[[int], Any]) -> float:
    import torch

    for copy in range(COPIES):
        call(copy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(COPIES):
            call(copy)
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / COPIES)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
