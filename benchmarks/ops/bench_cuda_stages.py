"""Finds the wrong stage of a CUDA kernel: routing, the up GEMM (h), the down GEMM (y) or the combine.

    python benchmarks/ops/bench_cuda_stages.py [--variant direct|bf16|fp8_weights|mxfp4_weights] [--tile N] ...

Runs one small call and compares what lies in its workspace with plain torch, row by row: the pattern of the wrong
rows and columns usually names the line (every other 8 rows: a fragment's halves; columns from 64 on: the second step
along K; only the last expert: an edge).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402
from bench_cuda_cases import DTYPES, Shape, make_tokens, make_weights, problem_of  # noqa: E402
from bench_cuda_machine import why_not_here  # noqa: E402
from torch import Tensor  # noqa: E402

from moe_optimizer.ops import _load, reference  # noqa: E402
from moe_optimizer.ops.cuda_variants import DirectVariant, GemmMode, GroupedVariant  # noqa: E402
from moe_optimizer.ops.kernel_arguments import CudaProblem  # noqa: E402


def main() -> int:
    """Run and compare; 0 when every stage is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=("direct", "bf16", "fp8_weights", "mxfp4_weights"), default="bf16")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="with direct: of the weights")
    for name, value in (("tile", 16), ("tokens", 5), ("top-k", 2), ("experts", 3), ("hidden", 64), ("width", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    why_not = why_not_here()
    if why_not:
        print(f"bench_cuda_stages: {why_not}", file=sys.stderr)
        return 3
    shape = Shape("stages", options.hidden, options.width, options.experts, options.top_k)
    dtypes = {"direct": options.dtype, "bf16": "bf16", "fp8_weights": "fp8", "mxfp4_weights": "mxfp4"}
    dtype = dtypes[options.variant]
    weights = make_weights(shape, dtype, seed=1)
    problem = problem_of(weights, make_tokens(shape, options.tokens, "uniform", seed=1))
    workspace = run(problem, options.variant, options.tile)
    return 0 if compare(problem, workspace, options.variant) else 1


@dataclass(frozen=True)
class Workspace:
    """The device memory of a call, and where its parts lie."""

    buffer: Tensor
    addresses: dict[str, int]

    def part(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """The first elements of a part."""
        start = self.addresses[name] - self.buffer.data_ptr()
        return self.buffer[start : start + count * dtype.itemsize].view(dtype)


def run(problem: CudaProblem, variant: str, tile: int) -> Workspace:
    """Run the call to its end in a workspace of NaN and -1."""
    kernels, device = _load.kernels(), problem.x.device
    chosen = DirectVariant() if variant == "direct" else GroupedVariant(GemmMode[variant.upper()], tile)
    call = problem.call(chosen, torch.cuda.get_device_properties(device).multi_processor_count)
    size = kernels.cuda_layout(*call, 0)["bytes"]
    buffer = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
    counter = torch.zeros((), dtype=torch.int32, device=device)
    kernels.cuda_run(*call, buffer.data_ptr(), counter.data_ptr(), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return Workspace(buffer, kernels.cuda_layout(*call, buffer.data_ptr())["workspace"])


def compare(problem: CudaProblem, workspace: Workspace, variant: str) -> bool:
    """Print every stage's verdict; whether all are right."""
    p = problem
    assert p.topk_ids is not None
    assert p.topk_weights is not None
    flat = p.topk_ids.flatten().long()
    order = flat.sort(stable=True).indices[int((flat < 0).sum()) :]
    pairs, width, hidden = flat.numel(), p.sizes.intermediate_size, p.sizes.hidden_size
    stored_width = -(-width // 128) * 128 if variant == "mxfp4_weights" else width
    right = True
    if variant != "direct":
        right &= _same("sorted_token", workspace.part("sorted_token", order.numel(), torch.int32), order.int())
        want = torch.full_like(flat, -1, dtype=torch.int32)
        want[order] = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
        right &= _same("pair_position", workspace.part("pair_position", pairs, torch.int32), want)
    # The direct kernels keep h by pair and no y.
    if variant == "direct":
        order = (flat >= 0).nonzero().flatten()
    h = workspace.part("h", pairs * stored_width, torch.bfloat16).view(pairs, stored_width)
    h = h[order] if variant == "direct" else h[: order.numel()]
    want_h, want_y = [], []
    for pair in order.tolist():
        expert = int(flat[pair])
        w13 = reference.dequantize(p.w13, p.w13_scale, expert, torch.float32)
        w2 = reference.dequantize(p.w2, p.w2_scale, expert, torch.float32)
        row = reference.activate((p.x[pair // p.top_k].float() @ w13.T)[None], p.activation)[0]
        want_h.append(row)
        want_y.append(row @ w2.T)
    stored_h = torch.stack(want_h)
    if variant == "fp8_weights":  # stored in the order that the down GEMM reads
        k = torch.arange(width, device=h.device)
        position = (k & ~15) | ((k & 12) >> 1) | ((k & 2) << 2) | (k & 1)
        stored_h = torch.empty_like(stored_h).index_copy_(1, position, stored_h)
    if variant == "mxfp4_weights":  # likewise, and filled up with zeros
        k = torch.arange(stored_width, device=h.device)
        position = (k & ~127) | ((k & 24) << 2) | ((k & 3) << 3) | ((k & 96) >> 4) | ((k & 4) >> 2)
        filled = torch.nn.functional.pad(stored_h, (0, stored_width - width))
        stored_h = torch.empty_like(filled).index_copy_(1, position, filled)
    right &= _close("h (up GEMM, activation)", h.float(), stored_h)
    if variant != "direct":
        y = workspace.part("y", pairs * hidden, torch.bfloat16).view(pairs, hidden)[: order.numel()]
        right &= _close("y (down GEMM)", y.float(), torch.stack(want_y))
    want = reference.fused_experts(p.x, p.w13, p.w2, p.topk_weights, p.topk_ids, w13_scale=p.w13_scale,
                                   w2_scale=p.w2_scale, activation=p.activation)  # fmt: skip
    return right & _close("out (combine)", p.out.float(), want.float())


def _same(name: str, got: Tensor, want: Tensor) -> bool:
    wrong = (got != want).nonzero().flatten()
    print(f"{name:24} {'right' if not len(wrong) else f'WRONG at {wrong[:8].tolist()}: {got[wrong[:8]].tolist()}'}")
    return not len(wrong)


def _close(name: str, got: Tensor, want: Tensor) -> bool:
    scale = want.square().mean().sqrt()
    wrong = ~((got - want).abs() <= 0.03 * scale + 0.02 * want.abs())  # NaN counts as wrong
    error = (got - want).norm() / want.norm()
    if not wrong.any():
        print(f"{name:24} right, relative error {error:.1e}")
        return True
    rows, columns = wrong.any(1).nonzero().flatten().tolist(), wrong.any(0).nonzero().flatten().tolist()
    print(f"{name:24} WRONG, relative error {error:.1e}, {int(wrong.sum())} of {wrong.numel()} elements, "
          f"{int(got.isnan().sum())} NaN")  # fmt: skip
    print(f"  rows {rows[:24]}{' ...' if len(rows) > 24 else ''}")
    print(f"  columns {columns[:24]}{' ...' if len(columns) > 24 else ''}")
    first = wrong.nonzero()[0].tolist()
    print(f"  first [{first[0]}, {first[1]}]: got {got[tuple(first)]:.4g}, expected {want[tuple(first)]:.4g}")
    return False


if __name__ == "__main__":
    sys.exit(main())
