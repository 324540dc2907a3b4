"""Times the gate product and top-k of few tokens in one launch beside torch's product and vLLM's top-k, on a GPU.

    python benchmarks/ops/bench_cuda_gate.py [--write] [--tokens 1,2,4,8] [--shapes qwen3-30b-a3b] [--no-layer]

Every side runs after an RMS norm that makes its tokens, as in a model: what a side adds to the norm alone is what it
costs there. The gates of a graph are more than L2 holds, and each call has tokens of its own; sides alternate.
  gate    norm; norm, F.linear, top-k of vLLM (topk_softmax); norm, gate_topk
  layer   the same two followed by our experts, the kernel that is chosen by sizes (and by vLLM's Triton experts, where
          vLLM is), 8 weight sets
--write: benchmarks/records/<date>_<gpu>_gate_topk.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from benchmarks.record import RECORDS, head, parser_of  # noqa: E402

if TYPE_CHECKING:
    from bench_cuda_cases import Shape
    from bench_cuda_sides import Call
    from torch import Tensor

GATE_BYTES = 120 << 20
"""Of all gates of a graph: more than twice what L2 holds (50 MiB)."""
MAX_GATES = 240
NUM_SETS = 8
EPSILON = 1e-6


def main() -> int:
    """Time what the arguments say; 0 unless a side is wrong."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--tokens", default="1,2,4,8")
    parser.add_argument("--shapes", default="qwen3-30b-a3b")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--no-layer", action="store_true", help="the gate alone")
    options = parser.parse_args()
    from bench_cuda_machine import why_not_here

    why_not = why_not_here()
    if why_not:
        print(f"bench_cuda_gate: {why_not}", file=sys.stderr)
        return 3
    from bench_cuda_cases import SHAPES
    from bench_cuda_sides import find_vllm
    from bench_cuda_timing import device_facts

    vllm, why_no_vllm = find_vllm()
    print("stock: " + (f"vLLM {vllm.version}" if vllm else why_no_vllm), flush=True)
    facts: dict[str, Any] = {
        **head("the gate product and top-k in one launch beside F.linear and vLLM's topk_softmax: L2-cold, CUDA "
               "graphs, after an RMS norm each, sides interleaved", options.commit),
        "environment": {**device_facts(), "vllm": None if vllm is None else vllm.version},
        "why_no_vllm": why_no_vllm, "cases": [],
    }  # fmt: skip
    print(f"{'shape':18} {'T':>3} {'side':44} {'us':>8} {'beside the norm':>16}")
    for name in options.shapes.split(","):
        for tokens in (int(value) for value in options.tokens.split(",")):
            case = gate_case(SHAPES[name], tokens, with_topk=vllm is not None, repetitions=options.repetitions)
            facts["cases"].append(case)
        if not options.no_layer:
            facts["cases"] += layer_cases(SHAPES[name], options, vllm)
    if options.write:
        gpu = facts["environment"]["device"].split()[1].lower()
        path = RECORDS / f"{facts['date']}_{gpu}_gate_topk.json"
        path.write_text(json.dumps(facts) + "\n", encoding="utf-8")
        print(f"wrote {path.name}")
    return 0


class Step:
    """One call's tensors: what the norm reads and makes, a gate, outputs for both sides."""

    def __init__(self, shape: Shape, tokens: int, seed: int) -> None:
        import torch

        from moe_optimizer.ops.kernel_arguments import GateTopk, Router

        g = torch.Generator(device="cuda").manual_seed(seed)
        self.source = torch.randn(tokens, shape.hidden, device="cuda", generator=g).bfloat16()
        self.norm_weight = torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16)
        self.x = torch.empty_like(self.source)
        gate = torch.randn(shape.routed_experts, shape.hidden, device="cuda", generator=g).bfloat16()
        gate /= shape.hidden**0.5
        logits = torch.empty(tokens, shape.routed_experts, device="cuda", dtype=torch.bfloat16)
        self.weights = torch.empty(tokens, shape.top_k, device="cuda")
        self.ids = torch.empty(tokens, shape.top_k, device="cuda", dtype=torch.int32)
        self.token_experts = torch.empty_like(self.ids)
        self.fused = GateTopk(self.x, gate, Router(logits, shape.top_k), self.weights, self.ids)

    def norm(self) -> Tensor:
        """The launch before the gate, by vLLM's kernel where there is one."""
        import torch

        try:
            from vllm import _custom_ops as ops
        except ImportError:
            self.x.copy_(torch.nn.functional.rms_norm(self.source, self.source.shape[1:], self.norm_weight, EPSILON))
            return self.x
        ops.rms_norm(self.x, self.source, self.norm_weight, EPSILON)
        return self.x

    def stock(self, *, with_topk: bool = True) -> Tensor:
        """The gate as vLLM runs it."""
        import torch

        logits = torch.nn.functional.linear(self.x, self.fused.gate)
        if with_topk:
            from vllm import _custom_ops as ops

            ops.topk_softmax(self.weights, self.ids, self.token_experts, logits, True)
        return logits

    def one_launch(self) -> Tensor:
        """Ours."""
        from moe_optimizer.ops.gate_topk import run_kernel

        run_kernel(self.fused)
        return self.ids


def chained(steps: list[Step], *work: str, **options: Any) -> list[Call]:
    """The norm and then the named methods, one call per step."""

    def call_of(step: Step) -> Call:
        def call() -> Tensor:
            out = step.norm()
            for name in work:
                out = getattr(step, name)(**options)
            return out

        return call

    return [call_of(step) for step in steps]


def gate_case(shape: Shape, tokens: int, *, with_topk: bool, repetitions: int) -> dict[str, Any]:
    """Time the gate alone."""
    import torch

    count = min(MAX_GATES, -(-GATE_BYTES // (2 * shape.routed_experts * shape.hidden)))
    steps = [Step(shape, tokens, seed) for seed in range(count)]
    check(steps[0], with_topk=with_topk)
    sides = {"norm": chained(steps), "norm, F.linear": chained(steps, "stock", with_topk=False)}
    if with_topk:
        sides["norm, F.linear, topk_softmax"] = chained(steps, "stock")
    sides["norm, gate_topk"] = chained(steps, "one_launch")
    case = timed(shape, tokens, "gate", sides, repetitions)
    del steps
    torch.cuda.empty_cache()
    return case


def check(step: Step, *, with_topk: bool) -> None:
    """Raise unless both sides choose the same experts, up to equal logits."""
    import torch

    step.norm()
    step.one_launch()
    ours, logits = step.ids.clone(), step.fused.router.logits.float()
    if not with_topk:
        return
    theirs_logits = step.stock().float()
    torch.cuda.synchronize()
    theirs = step.ids.long()
    close = torch.allclose(logits, theirs_logits, rtol=2**-7, atol=1e-3)
    chosen = torch.allclose(
        theirs_logits.gather(1, ours.long()), theirs_logits.gather(1, theirs), rtol=2**-6, atol=0.01
    )
    if not (close and chosen):
        raise SystemExit(f"bench_cuda_gate: the sides differ: ids {ours.tolist()} and {theirs.tolist()}")


def layer_cases(shape: Shape, options: Any, vllm: Any) -> list[dict[str, Any]]:
    """Time the gate with the experts behind it."""
    import torch
    from bench_cuda_cases import make_weights

    weights = [make_weights(shape, "bf16", seed=seed) for seed in range(NUM_SETS)]
    cases = []
    for tokens in (int(value) for value in options.tokens.split(",")):
        steps = [Step(shape, tokens, seed) for seed in range(NUM_SETS)]
        sides = layer_sides(steps, weights, vllm)
        cases.append(timed(shape, tokens, "layer", sides, options.repetitions))
    del weights
    torch.cuda.empty_cache()
    return cases


def layer_sides(steps: list[Step], weights: list[Any], vllm: Any) -> dict[str, list[Call]]:
    """The norm, a gate and experts, one call per weight set."""
    from bench_cuda_cases import Tokens, problem_of

    from moe_optimizer.ops import cuda_dispatch
    from moe_optimizer.ops.cuda_variants import choose_variant

    sides: dict[str, list[Call]] = {}

    def add(name: str, gate: str, experts: str) -> None:
        def call_of(step: Step, weight: Any) -> Call:
            tokens = Tokens(step.x, step.fused.router.logits, step.weights, step.ids, None)
            problem = problem_of(weight, tokens)
            variant = choose_variant(problem.sizes)
            of_vllm = vllm.experts(weight, tokens) if experts == "Triton" else None

            def call() -> Tensor:
                step.norm()
                getattr(step, gate)()
                if of_vllm is not None:
                    return of_vllm()
                cuda_dispatch.run(problem, variant)
                return problem.out

            return call

        sides[name] = [call_of(step, weight) for step, weight in zip(steps, weights, strict=True)]

    if vllm is not None:
        add("norm, F.linear, topk_softmax, Triton", "stock", "Triton")
        add("norm, F.linear, topk_softmax, ours", "stock", "ours")
    add("norm, gate_topk, ours", "one_launch", "ours")
    return sides


def timed(shape: Shape, tokens: int, what: str, sides: dict[str, list[Call]], repetitions: int) -> dict[str, Any]:
    """Time the sides, print a line each, and return what the record keeps."""
    from bench_cuda_timing import summary, time_interleaved

    samples = time_interleaved(sides, repetitions=repetitions)
    medians = {name: summary(times) for name, times in samples.items()}
    for name, side in medians.items():
        beside = f"{side['median_us'] - medians['norm']['median_us']:16.2f}" if "norm" in medians else ""
        print(f"{shape.name:18} {tokens:3d} {name:44} {side['median_us']:8.2f} {beside}", flush=True)
    rounded = {name: [round(value, 3) for value in times] for name, times in samples.items()}
    calls = len(next(iter(sides.values())))
    return {"shape": vars(shape), "what": what, "tokens": tokens, "calls": calls, "samples_us": rounded}


if __name__ == "__main__":
    sys.exit(main())
