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
BLOCK = 128


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
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
    from vllm.utils import deep_gemm

    channels = [_quantised(weight, 1, weight.shape[1]) for weight in weights]
    blocks = [_quantised(weight, BLOCK, BLOCK) for weight in weights]
    out = torch.empty(x.shape[0], weights[0].shape[0], device="cuda", dtype=torch.bfloat16)

    def cutlass_channel(copy: int) -> None:
        q, scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        ops.cutlass_scaled_mm(q, channels[copy][0].t(), scale, channels[copy][1], torch.bfloat16)

    def cutlass_block(copy: int) -> None:
        q, scale = per_token_group_quant_fp8(x, BLOCK, column_major_scales=True)
        ops.cutlass_scaled_mm(q, blocks[copy][0].t(), scale, blocks[copy][1].t(), torch.bfloat16)

    def deep_gemm_block(copy: int) -> None:
        q, scale = per_token_group_quant_fp8(x, BLOCK, column_major_scales=True, use_ue8m0=False)
        deep_gemm.fp8_gemm_nt((q, scale), blocks[copy], out, is_deep_gemm_e8m0_used=False)

    return {
        "bf16": lambda copy: torch.mm(x, weights[copy].t()),
        "cutlass_channel": cutlass_channel,
        "cutlass_block": cutlass_block,
        "deep_gemm_block": deep_gemm_block,
    }


def _quantised(weight: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """Return a weight in E4M3 and its FP32 scales, one per block of that size."""
    import torch

    blocks = weight.float().view(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    return (blocks / scale).view(weight.shape).to(torch.float8_e4m3fn), scale[:, 0, :, 0].contiguous()


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
