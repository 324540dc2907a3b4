"""Times the product of few tokens with the weights of dense layers: `skinny_gemm` beside what vLLM runs, on a GPU.

    python benchmarks/ops/bench_cuda_linears.py [--write | --out FILE] [--tokens 1,2,4,8] [--shapes qwen3-qkv,...]
        [--weights bf16,tensor,channel,block]

Weights are cold: a graph has more of them than L2 holds. Every product follows an RMS norm that makes its tokens, as
in a model: a side's time less that of the norm alone is what the product costs there. Sides alternate.
  alone   norm, product
  chain   norm, QKV product, a norm of the queries, something that waits as long as attention and reads nothing, output
          projection; of layers of one model
  layer   the same, norm, gate_topk and our experts, of Qwen3-30B-A3B
Weights are BF16, beside F.linear; or E4M3 with a scale per tensor, channel or 128 x 128 block, beside vLLM's product
with the quantisation of its tokens (CUTLASS; blocks: FlashInfer where vLLM has it, or DeepGEMM), or torch's where vLLM
is not installed.
Times are microseconds without the rest; the floor is of the data sheet's 3.35 TB/s.
"""

from __future__ import annotations

import functools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from fp8_products import BLOCK, SCALES, product, quantised, stock_side  # noqa: E402

from benchmarks.record import head, kept, parser_of  # noqa: E402

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from bench_cuda_sides import Call
    from torch import Tensor

    from moe_optimizer.ops.kernel_arguments import SkinnyGemm


OURS = "skinny_gemm"
COLD_BYTES = 200 << 20
"""Of the weights of a graph: four times what L2 holds (50 MiB)."""
MIN_CALLS = 24
EPSILON = 1e-6
WAIT_CYCLES = 15_000
"""Attention of one request takes 8 us or more: 15,000 cycles at 1.98 GHz are 7.6 us."""
FIRST_ROWS = 4096
"""Whose products are compared with exact ones."""


@dataclass(frozen=True)
class Linear:
    """A weight of a model."""

    name: str
    rows: int
    depth: int
    bias: bool = False


LINEARS = {
    linear.name: linear
    for linear in (
        Linear("qwen3-qkv", 5120, 2048),
        Linear("qwen3-o", 2048, 4096),
        Linear("qwen3-qkv-tp2", 2560, 2048),
        Linear("qwen3-o-tp2", 2048, 2048),
        Linear("qwen3-qkv-tp4", 1280, 2048),
        Linear("qwen3-o-tp4", 2048, 1024),
        Linear("mixtral-qkv", 6144, 4096),
        Linear("mixtral-o", 4096, 4096),
        Linear("gpt-oss-qkv", 5120, 2880, bias=True),
        Linear("gpt-oss-o", 2880, 4096, bias=True),
        Linear("glm-air-qkv", 14336, 4096, bias=True),
        Linear("glm-air-o", 4096, 12288),
        Linear("qwen3-head", 151936, 2048),
    )
}
CHAINS = {"qwen3": 12, "mixtral": 8, "gpt-oss": 10}
"""Layers of a graph."""
LAYER_SETS = 8


def main() -> int:
    """Time what the arguments say; 0 unless a kernel is wrong."""
    from_names = ",".join(LINEARS)
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--out", type=Path, help="the record, wherever it should be")
    parser.add_argument("--tokens", default="1,2,4,8")
    parser.add_argument("--shapes", default=from_names)
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--chains", default=",".join(CHAINS))
    parser.add_argument("--no-layer", action="store_false", dest="layer")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--total-s", type=float, default=100, help="starts no case beyond so many seconds")
    options = parser.parse_args()
    unknown = set(options.weights.split(",")) - {"bf16", *SCALES}
    if unknown:
        parser.error(f"--weights: got {', '.join(sorted(unknown))}, expected of bf16, {', '.join(SCALES)}")
    from bench_cuda_machine import why_not_here

    why_not = why_not_here()
    if why_not:
        print(f"bench_cuda_linears: {why_not}", file=sys.stderr)
        return 3
    from bench_cuda_timing import device_facts

    ends = time.monotonic() + options.total_s
    facts: dict[str, Any] = {
        **head("skinny_gemm beside the product that vLLM runs: L2-cold, CUDA graphs, after an RMS norm each, sides "
               "interleaved; and both products of a layer with a wait between", options.commit),
        "environment": device_facts(), "cases": [], "wrong": [], "left_out": [],
    }  # fmt: skip
    tokens = [int(value) for value in options.tokens.split(",")]
    forms = options.weights.split(",")
    with kept(facts, "linears", out=options.out, write=options.write) as save:
        for number, form in enumerate(forms):
            now = time.monotonic()  # each has an equal share of what is left
            time_weights(form, tokens, options, facts, now + (ends - now) / (len(forms) - number), save=save)
    for what in ("wrong", "left_out"):
        if facts[what]:
            print(f"{what}: {', '.join(facts[what])}")
    return 1 if facts["wrong"] else 0


def time_weights(
    form: str, tokens: list[int], options: Namespace, facts: dict[str, Any], ends: float, *, save: Callable[[], None]
) -> None:
    """Time all that was asked for with one format of weights; `save` is called after each weight and chain."""
    print(f"{form:16} {'T':>2} {'floor':>7} {stock_of(form):>17} {OURS:>12}", flush=True)
    for name in options.shapes.split(","):
        if time.monotonic() > ends or not has_stock(LINEARS[name].depth, form):
            facts["left_out"].append(f"{form} {name}")
            continue
        alone(LINEARS[name], form, tokens, options.repetitions, facts)
        save()
    for name in options.chains.split(",") if options.chains else ():
        for count in tokens:
            if time.monotonic() > ends or not has_stock(LINEARS[f"{name}-qkv"].depth, form):
                facts["left_out"].append(f"{form} chain {name} {count}")
                continue
            chain(name, form, count, options.repetitions, facts)
            save()
    if options.layer:
        layers(form, tokens, options.repetitions, facts, ends)


def stock_of(form: str) -> str:
    """Return the side beside ours."""
    return "F.linear" if form == "bf16" else stock_side(form)


def has_stock(depth: int, form: str) -> bool:
    """Whether vLLM multiplies weights of so many columns: it rounds tokens in whole blocks of 128."""
    return form != "block" or depth % BLOCK == 0


class Weight(NamedTuple):
    """A weight, as either side takes it."""

    w: Tensor
    bias: Tensor | None
    scale: Tensor | None
    stock: str
    """The side beside ours."""


def new_weights(linear: Linear, form: str, count: int) -> list[Weight]:
    """Random weights and biases."""
    import torch

    made = []
    for _ in range(count):
        w = torch.empty(linear.rows, linear.depth, device="cuda", dtype=torch.bfloat16).normal_()
        w.mul_(linear.depth**-0.5)
        bias = torch.randn(linear.rows, device="cuda").bfloat16() if linear.bias else None
        w, scale = (w, None) if form == "bf16" else quantised(w, form)
        made.append(Weight(w, bias, scale, stock_of(form)))
    return made


class Step:
    """One product with the norm before it."""

    def __init__(self, weight: Weight, tokens: int) -> None:
        import torch

        from moe_optimizer.ops.kernel_arguments import SkinnyGemm

        rows, depth = weight.w.shape
        self.stock = weight.stock
        self.source = torch.randn(tokens, depth, device="cuda").bfloat16()
        self.norm_weight = torch.ones(depth, device="cuda", dtype=torch.bfloat16)
        x = torch.empty_like(self.source)
        out = torch.empty(tokens, rows, device="cuda", dtype=torch.bfloat16)
        self.gemm = SkinnyGemm(x, weight.w, weight.bias, out, weight.scale)

    def norm(self) -> Tensor:
        """Make the tokens."""
        rms_norm(self.gemm.x, self.source, self.norm_weight)
        return self.gemm.x

    def theirs(self) -> Tensor:
        """The product as vLLM runs it."""
        import torch

        gemm = self.gemm
        if gemm.scale is None:
            return torch.nn.functional.linear(gemm.x, gemm.w, gemm.bias)
        return product(self.stock)(gemm.x, gemm.w, gemm.scale, gemm.bias)

    def ours(self) -> Tensor:
        """Ours."""
        from moe_optimizer.ops.skinny_gemm import run_kernel

        run_kernel(self.gemm)
        return self.gemm.out

    def multiply(self, side: str) -> Tensor:
        """`side`: `OURS`, or the other."""
        return self.ours() if side == OURS else self.theirs()


def rms_norm(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """A small kernel: vLLM's where there is one."""
    import torch

    try:
        from vllm import _custom_ops as ops
    except ImportError:
        out.copy_(torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPSILON))
        return
    ops.rms_norm(out, x, weight, EPSILON)


def is_wrong(step: Step) -> str:
    """Return what is wrong with the kernel's product, "" for nothing."""
    import torch

    step.norm()
    gemm = step.gemm
    gemm.out.fill_(float("nan"))
    try:
        first = step.ours().clone()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    if not torch.equal(first, step.ours()):
        return "not the same bits twice"
    theirs = step.theirs()
    x, w = gemm.x.double(), exact_weight(gemm)[-FIRST_ROWS:]
    exact = x @ w.T + (0 if gemm.bias is None else gemm.bias[-FIRST_ROWS:].double())
    error, least = ((each[:, -FIRST_ROWS:].double() - exact).abs().max().item() for each in (first, theirs))
    largest = exact.abs().max().item()
    if gemm.scale is not None:  # theirs rounds its tokens to E4M3
        return "" if error <= 2.0**-8 * largest else f"error {error:.2e} of {largest:.2e}"
    # cuBLAS rounds once, as ours does; not so where it splits K: then its error is the larger one.
    if not error <= 1.1 * least + 1e-5 * largest:
        return f"error {error:.2e}, cuBLAS {least:.2e}"
    apart = (first.float() - theirs.float()).abs().max().item()
    return "" if apart <= 0.02 * theirs.float().abs().max().item() else f"{apart:.2e} from cuBLAS"


def exact_weight(gemm: SkinnyGemm) -> Tensor:
    """Return what the weight stands for, in FP64."""
    from moe_optimizer.ops.skinny_gemm import dequantized

    return gemm.w.double() if gemm.scale is None else dequantized(gemm.w, gemm.scale).double()


def alone(linear: Linear, form: str, tokens: list[int], repetitions: int, facts: dict[str, Any]) -> None:
    """Time one weight's product, for every number of tokens."""
    import torch
    from bench_cuda_timing import time_interleaved

    weight_bytes = bytes_of(linear, form)
    weights = new_weights(linear, form, max(2, -(-COLD_BYTES // weight_bytes)))
    calls = max(len(weights), MIN_CALLS if weight_bytes < COLD_BYTES else 4)
    for count in tokens:
        steps = [Step(weights[i % len(weights)], count) for i in range(calls)]
        wrong = is_wrong(steps[0])
        if wrong:
            facts["wrong"].append(f"{form} {linear.name} T={count}: {wrong}")
            continue
        sides: dict[str, list[Call]] = {"norm": [step.norm for step in steps]}
        sides |= {side: [functools.partial(after_norm, step, side) for step in steps] for side in sides_of(form)}
        samples = time_interleaved(sides, repetitions=repetitions)
        keep(facts, {"what": "alone", **vars(linear), "weights": form, "tokens": count, "calls": calls}, samples)
        show(linear.name, form, count, weight_bytes, samples)
        del steps, sides
    del weights
    torch.cuda.empty_cache()


def after_norm(step: Step, side: str) -> Tensor:
    """Run the norm and the product."""
    step.norm()
    return step.multiply(side)


class Layer:
    """Both products of a layer, with what stands between them in a model."""

    def __init__(self, qkv: Step, o: Step) -> None:
        self.qkv = qkv
        self.o = o

    def run(self, side: str | None) -> Tensor:
        """None: the rest alone."""
        import torch

        self.qkv.norm()
        if side is not None:
            self.qkv.multiply(side)
        self.o.norm()
        torch.cuda._sleep(WAIT_CYCLES)
        return self.o.gemm.x if side is None else self.o.multiply(side)


def made_layers(name: str, form: str, tokens: int, count: int) -> list[Layer]:
    """Layers of a model."""
    weights = zip(*(new_weights(LINEARS[f"{name}-{part}"], form, count) for part in ("qkv", "o")), strict=True)
    return [Layer(Step(first, tokens), Step(second, tokens)) for first, second in weights]


def sides_of(form: str) -> tuple[str, str]:
    """Return both sides, ours last."""
    return stock_of(form), OURS


def bytes_of(linear: Linear, form: str) -> int:
    """Of a weight, without its scales."""
    return (2 if form == "bf16" else 1) * linear.rows * linear.depth


def layer_bytes(name: str, form: str) -> int:
    """Of both weights of a layer."""
    return sum(bytes_of(LINEARS[f"{name}-{part}"], form) for part in ("qkv", "o"))


def chain(name: str, form: str, tokens: int, repetitions: int, facts: dict[str, Any]) -> None:
    """Time both products of a layer, without its experts."""
    import torch
    from bench_cuda_timing import time_interleaved

    made = made_layers(name, form, tokens, CHAINS[name])
    calls: dict[str, list[Call]] = {
        side or "norm": [functools.partial(layer.run, side) for layer in made] for side in (None, *sides_of(form))
    }
    samples = time_interleaved(calls, repetitions=repetitions)
    keep(facts, {"what": "chain", "name": name, "weights": form, "tokens": tokens, "calls": len(made)}, samples)
    show(f"chain {name}", form, tokens, layer_bytes(name, form), samples)
    torch.cuda.empty_cache()  # what earlier cases left


def layers(form: str, tokens: list[int], repetitions: int, facts: dict[str, Any], ends: float) -> None:
    """Time whole layers of Qwen3-30B-A3B."""
    import torch
    from bench_cuda_cases import SHAPES, Tokens, make_weights, problem_of
    from bench_cuda_gate import Step as Gate
    from bench_cuda_timing import time_interleaved

    from moe_optimizer.ops import cuda_dispatch
    from moe_optimizer.ops.cuda_variants import choose_variant

    if time.monotonic() > ends:  # the weights alone take seconds
        facts["left_out"] += [f"{form} layer {count}" for count in tokens]
        return
    shape = SHAPES["qwen3-30b-a3b"]
    weights = [make_weights(shape, "bf16", seed=seed) for seed in range(LAYER_SETS)]
    for count in tokens:
        if time.monotonic() > ends:
            facts["left_out"].append(f"{form} layer {count}")
            continue
        made = made_layers("qwen3", form, count, LAYER_SETS)
        gates = [Gate(shape, count, seed) for seed in range(LAYER_SETS)]
        problems = [
            problem_of(weight, Tokens(gate.x, gate.fused.router.logits, gate.weights, gate.ids, None))
            for weight, gate in zip(weights, gates, strict=True)
        ]

        def call_of(layer: Layer, gate: Gate, problem: Any, side: str | None) -> Call:
            kernel = choose_variant(problem.sizes)

            def call() -> Tensor:
                layer.run(side)
                gate.norm()
                gate.one_launch()
                cuda_dispatch.run(problem, kernel)
                return problem.out

            return call

        calls = {
            side or "norm": [call_of(*each, side) for each in zip(made, gates, problems, strict=True)]
            for side in (None, *sides_of(form))
        }
        samples = time_interleaved(calls, repetitions=repetitions)
        keep(facts, {"what": "layer", "name": "qwen3", "weights": form, "tokens": count, "calls": LAYER_SETS}, samples)
        show("layer qwen3", form, count, layer_bytes("qwen3", form), samples)
        torch.cuda.empty_cache()


def keep(facts: dict[str, Any], case: dict[str, Any], samples: dict[str, list[float]]) -> None:
    """Add a case to the record."""
    rounded = {name: [round(value, 3) for value in times] for name, times in samples.items()}
    facts["cases"].append({**case, "samples_us": rounded})


def show(name: str, form: str, tokens: int, weight_bytes: int, samples: dict[str, list[float]]) -> None:
    """Print a line: what each side adds to the rest."""
    from bench_cuda_timing import summary

    rest = summary(samples["norm"])["median_us"]
    theirs, ours = (summary(samples[side])["median_us"] - rest for side in sides_of(form))
    print(f"{name:16} {tokens:2d} {weight_bytes / 3.35e6:7.2f} {theirs:17.2f} {ours:12.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
