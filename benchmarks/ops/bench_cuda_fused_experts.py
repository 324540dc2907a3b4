"""Builds, checks and times the CUDA kernels against vLLM's on one Hopper GPU, in one command.

    python benchmarks/ops/bench_cuda_fused_experts.py --out FOLDER [--budget-s 460]

Beside vLLM's Triton kernels (Marlin's for MXFP4 and INT4): DeepGEMM's FP8 experts, where vLLM has them.

In this order, each result written and printed as it comes, until the budget is spent:
  1. bash build.sh (--no-build leaves it out), the two ceilings of the machine;
  2. correctness per kernel family, each in its own process with a time limit: a family that hangs, crashes or is
     wrong is reported and left out of the timing, the others go on;
  3. timing: BF16, FP8, MXFP4 (--dtypes; INT4: int4_g32, _g64, _g128, with zero points _g128z), uniform then Zipf
     routing, the reference shape first, the unknown T first;
  4. the weights' types beside each other: our fastest kernel of each.
Each timed side is a CUDA graph of 8 calls on 8 weight sets (L2-cold) with their own routing; sides alternate.
FOLDER/record.json has it all: kept as benchmarks/records/<date>_<gpu>_fused_experts.json, it is what
scripts/write_kernel_speeds.py makes tables of.

What is known of the kernels on a GPU stands in docs/kernels.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from bench_cuda_cases import Shape, Tokens, Weights
    from bench_cuda_peers import Peer
    from bench_cuda_sides import Call, DeepGemm, Marlin, TritonKernels, Vllm

    from moe_optimizer.ops.kernel_arguments import CudaProblem

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

NUM_SETS = 8
BF16_ORDER = (1, 8, 64, 4096, 2, 4, 16, 32, 128, 512, 256, 1024, 2048, 8192)
CHECK_LIMIT_S = 90
GPT_OSS = "gpt-oss"
"""Begins the names of layers that vLLM gives to triton_kernels in MXFP4, where that package is there."""
CHOICE = "choice of experts"
"""The side of vLLM's softmax top-k alone, which is in the time of triton_kernels and in no other."""
MARLIN_ERROR = 0.03
"""Chosen: ten times what BF16 products lose; another order of the weights is off by about 1."""
DEEP_GEMM_FROM_TOKENS = 64  # below, its tiles of 128 tokens per expert are mostly padding


def main() -> int:
    """Run what the arguments say; 0 when every family was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON records")
    parser.add_argument("--budget-s", type=float, default=460, help="start no further case after this many seconds")
    parser.add_argument("--no-build", action="store_true")
    parser.add_argument("--shapes", default="qwen3-30b-a3b,mixtral-8x7b-tp4,deepseek-v3-ep16")
    parser.add_argument("--dtypes", default="bf16,fp8,mxfp4", help="of the weights, in this order")
    parser.add_argument("--routings", default="uniform,zipf")
    parser.add_argument(
        "--without", default="", help="kernels of others to leave out, of: vllm,deep_gemm,marlin,triton_kernels"
    )
    parser.add_argument(
        "--peers", default="", help="libraries to time too (bench_cuda_peers.py); see bench_cuda_peer_runs.py"
    )
    parser.add_argument("--no-check", action="store_true", help="leave out the check of the families: tests ran before")
    parser.add_argument("--tokens", default=",".join(map(str, BF16_ORDER)))
    parser.add_argument(
        "--check", help="check one kernel family and exit (used by this script; good under a sanitizer)"
    )
    parser.add_argument("--small", action="store_true", help="with --check: tiny shapes only")
    parser.add_argument("--commit", help="for the record, where the checkout came without its .git; +dirty when it is")
    options = parser.parse_args()
    from bench_cuda_cases import SHAPES, why_no_weights
    from bench_cuda_machine import why_not_here

    for shape, dtype in itertools.product(options.shapes.split(","), options.dtypes.split(",")):
        if why := why_no_weights(SHAPES[shape], dtype):
            parser.error(why)
    why_not = why_not_here()
    if why_not:
        print(f"bench_cuda_fused_experts: {why_not}", file=sys.stderr)
        return 3
    if options.check:
        return check_family(options.check, small=options.small)
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.no_build:
        subprocess.run(["bash", "build.sh"], cwd=ROOT, check=True, env=_build_environment(), timeout=300)
    from bench_cuda_sides import FAMILIES

    right: dict[str, bool] = dict.fromkeys(FAMILIES, True)
    if not options.no_check:
        right = check_families(options.out)
    timing(options, right, deadline=started + options.budget_s)
    write_record(options.out)
    compare_dtypes(options.out)
    return 0 if all(right.values()) else 4


def write_record(out: Path) -> None:
    """Put what a run found into FOLDER/record.json, times to 0.01 us."""
    facts = json.loads((out / "facts.json").read_text())
    timings = out / "timings.jsonl"
    cases = [json.loads(line) for line in timings.read_text().splitlines()] if timings.is_file() else []
    how = {
        "samples": "microseconds per call of 7 replays of a CUDA graph of 8 calls, rounded to 0.01",
    }
    (out / "record.json").write_text(json.dumps(facts | how | {"cases": [rounded_case(case) for case in cases]}) + "\n")


def rounded_case(case: dict[str, Any]) -> dict[str, Any]:
    """The case with times to 0.01 us, and each side's share of the floor."""
    sides = {
        name: {key: _rounded(value) for key, value in side.items()}
        | {"share_of_floor_percent": round(100 * case["floor_us"] / side["median_us"])}
        for name, side in case["sides"].items()
    }
    return case | {"floor_us": round(case["floor_us"], 2), "sides": sides}


def _rounded(value: float | list[float]) -> float | list[float]:
    return [round(each, 2) for each in value] if isinstance(value, list) else round(value, 2)


def _build_environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHON": sys.executable}


def check_families(out: Path) -> dict[str, bool]:
    """Each family in its own process, all at once; which of them are right."""
    from bench_cuda_sides import FAMILIES

    children = {}
    for family in FAMILIES:
        log = (out / f"check-{family}.log").open("w")
        command = [sys.executable, str(Path(__file__).resolve()), "--out", str(out), "--check", family]
        children[family] = (subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), log)
    deadline = time.monotonic() + CHECK_LIMIT_S
    right = {}
    for family, (child, log) in children.items():
        try:
            status = child.wait(timeout=max(1.0, deadline - time.monotonic()))
            verdict = "right" if status == 0 else f"WRONG or crashed (exit {status})"
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            status, verdict = 1, f"HANGS (killed after {CHECK_LIMIT_S} s)"
        log.close()
        right[family] = status == 0
        print(f"check {family:22} {verdict}", flush=True)
        if status:
            print("  " + "\n  ".join((out / f"check-{family}.log").read_text().splitlines()[-12:]), flush=True)
    (out / "checks.json").write_text(json.dumps(right, indent=2) + "\n")
    return right


def check_family(family: str, *, small: bool) -> int:
    """Every variant of a family on several sizes, with fresh inputs, twice for equal bits; 0 if all are right."""
    import torch
    from bench_cuda_cases import (
        DTYPES,
        SHAPES,
        TINY,
        TINY_INT4,
        TINY_MXFP4,
        is_int4,
        make_tokens,
        make_weights,
        problem_of,
    )
    from bench_cuda_sides import error_bound, errors, family_of, variants_for

    from moe_optimizer.ops import cuda_dispatch

    wrong = 0
    for dtype in DTYPES:
        tiny = TINY_INT4 if is_int4(dtype) else TINY_MXFP4 if dtype == "mxfp4" else TINY
        for shape in [tiny] if small else [tiny, SHAPES["qwen3-30b-a3b"]]:
            weights = make_weights(shape, dtype, seed=1)
            for tokens in (1, 3, 8, 16, 40, 130, 700):
                problem = problem_of(weights, make_tokens(shape, tokens, "uniform", seed=tokens))
                for variant in variants_for(problem):
                    if family_of(variant, dtype) != family:
                        continue
                    print(f"{shape.name} T={tokens} {variant}:", end=" ", flush=True)
                    problem.out.fill_(float("nan"))
                    cuda_dispatch.run(problem, variant)
                    torch.cuda.synchronize()
                    first = problem.out.clone()
                    problem.out.fill_(float("nan"))
                    cuda_dispatch.run(problem, variant)
                    torch.cuda.synchronize()
                    same = torch.equal(first, problem.out)
                    error, torch_error = errors(problem, first)
                    good = same and error <= error_bound(variant, torch_error)  # NaN is not <=
                    wrong += not good
                    print(f"error {error:.2e} (torch {torch_error:.2e}) repeat {'equal' if same else 'DIFFERS'}"
                          f"{'' if good else '  <-- WRONG'}", flush=True)  # fmt: skip
    return 1 if wrong else 0


def timing(options: argparse.Namespace, right: dict[str, bool], deadline: float) -> None:
    """Time case after case; one JSON line per case in FOLDER/timings.jsonl, facts in FOLDER/facts.json."""
    import torch
    from bench_cuda_cases import SHAPES, make_weights
    from bench_cuda_sides import find_deep_gemm, find_marlin, find_triton_kernels, find_vllm
    from bench_cuda_timing import device_facts, measure_ceilings

    from benchmarks.record import head

    ceilings = measure_ceilings()
    vllm, why_no_vllm = find_vllm()
    deep_gemm, why_no_deep_gemm = find_deep_gemm()
    marlin, why_no_marlin = find_marlin()
    triton_kernels, why_no_triton_kernels = find_triton_kernels()
    libraries, versions, why_no_peer = _libraries(options.peers)
    facts = {
        **head(
            "fused experts of one layer: our CUDA kernels beside vLLM fused_experts (Triton), DeepGEMM's FP8 "
            "and Marlin's 4-bit experts (of gpt-oss triton_kernels, as vLLM), L2-cold (8 weight sets), CUDA graphs, "
            "sides interleaved", options.commit,
        ),
        "environment": {**device_facts(), "vllm": None if vllm is None else vllm.version},
        **ceilings, "why_no_vllm": why_no_vllm,
        "deep_gemm": deep_gemm is not None, "why_no_deep_gemm": why_no_deep_gemm,
        "marlin": marlin is not None, "why_no_marlin": why_no_marlin,
        "triton_kernels": triton_kernels is not None, "why_no_triton_kernels": why_no_triton_kernels,
        "checks": right, "weight_sets": NUM_SETS, "cuda_sources": _cuda_sources(),
        **({"peers": versions, "why_no_peer": why_no_peer} if options.peers else {}),
    }  # fmt: skip
    (options.out / "facts.json").write_text(json.dumps(facts, indent=2, default=str) + "\n")
    rates = (
        f"copy {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, BF16 {ceilings['bf16_flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
    print(f"{rates}; stock: {'vLLM ' + vllm.version if vllm else why_no_vllm}", flush=True)
    if marlin is None:
        print(f"no Marlin: {why_no_marlin}", flush=True)
    print(f"{'shape':18} {'dtype':5} {'routing':7} {'T':>5} {'side':28} {'us':>9} {'floor':>6} {'x stock':>8}")
    left_out = options.without.split(",")
    peers = Peers(
        vllm=None if "vllm" in left_out else vllm,
        deep_gemm=None if "deep_gemm" in left_out else deep_gemm,
        marlin=None if "marlin" in left_out else marlin,
        triton_kernels=None if "triton_kernels" in left_out else triton_kernels,
        libraries=libraries,
        absent=why_no_peer,
    )
    order = [int(tokens) for tokens in options.tokens.split(",")]
    layers = list(itertools.product(options.shapes.split(","), options.dtypes.split(",")))
    for number, (shape_name, dtype) in enumerate(layers):
        shape, now = SHAPES[shape_name], time.monotonic()
        ends = now + (deadline - now) / (len(layers) - number)  # each has an equal share of what is left
        weights = [make_weights(shape, dtype, seed=s) for s in range(NUM_SETS)]
        for routing, tokens in itertools.product(options.routings.split(","), order):
            if time.monotonic() > ends:
                print(
                    f"{shape_name} {dtype} {routing} {tokens}: left out, its share of the budget is spent", flush=True
                )
                continue
            try:
                one_case(Case(shape, dtype, routing, tokens, weights), options.out, right, peers, ceilings)
            except Exception:  # noqa: BLE001  one case must not end the run; the trace is printed
                traceback.print_exc()
            write_record(options.out)  # a kernel that hangs lets nothing be written afterwards
        del weights
        torch.cuda.empty_cache()


def _libraries(names: str) -> tuple[dict[str, Peer], dict[str, str], dict[str, str]]:
    """The peers that can be imported, their versions, and why the others cannot."""
    if not names:
        return {}, {}, {}
    from bench_cuda_peers import PEERS, find_peers

    from benchmarks.record import packages

    found, absent = find_peers(names.split(","))
    if not found:
        sys.exit("; ".join(f"{name} cannot be imported: {why}" for name, why in absent.items()))
    return found, packages(*sorted({PEERS[name].distribution for name in found})), absent


def compare_dtypes(out: Path) -> None:
    """Print our fastest kernel of each weight type, and how often it is as fast as others on the same tokens."""
    cases = json.loads((out / "record.json").read_text())["cases"]
    fastest: dict[tuple[str, str, int], dict[str, tuple[float, str]]] = {}
    for case in cases:
        times = {name: side["median_us"] for name, side in case["sides"].items()}
        ours = {name: us for name, us in times.items() if name.startswith(("direct", "grouped"))}
        if ours:
            best = min(ours, key=lambda name: ours[name])
            key = (case["shape"]["name"], case["routing"], case["tokens"])
            fastest.setdefault(key, {})[case["dtype"]] = (ours[best], best)
            if case["dtype"] == "mxfp4":
                fastest[key] |= {side: (times[side], side) for side in ("vllm", "marlin") if side in times}
    print(f"{'shape':18} {'routing':7} {'T':>5} {'MXFP4 by':28} {'us':>9}  times as fast as")
    for (shape, routing, tokens), found in fastest.items():
        if "mxfp4" not in found:
            continue
        us, name = found.pop("mxfp4")
        others = "  ".join(f"{other} {time / us:.2f} ({time:.1f} us)" for other, (time, _) in found.items())
        print(f"{shape:18} {routing:7} {tokens:5d} {name:28} {us:9.1f}  {others}", flush=True)


def _cuda_sources() -> str:
    """The hash of the sources that the running kernels were built from."""
    info = json.loads((ROOT / "moe_optimizer/ops/build_info.json").read_text(encoding="utf-8"))
    return info["sources"]["cuda"]


@dataclass(frozen=True)
class Case:
    """One line of the table's key, and what it is run with."""

    shape: Shape
    dtype: str
    routing: str
    tokens: int
    weights: list[Weights]


class Peers(NamedTuple):
    """The kernels of others, as far as they are here."""

    vllm: Vllm | None
    deep_gemm: DeepGemm | None
    marlin: Marlin | None
    triton_kernels: TritonKernels | None
    libraries: dict[str, Peer]
    absent: dict[str, str]
    """Why a library that was asked for cannot be imported."""


def marlin_side(case: Case, marlin: Marlin, inputs: list[Tokens], problem: CudaProblem) -> tuple[list[Call], str]:
    """Marlin's calls of a case, and why they are not timed, or ""."""
    from bench_cuda_cases import why_not_marlin
    from bench_cuda_sides import errors

    why_not = why_not_marlin(case.shape, case.dtype)
    if why_not:
        return [], why_not
    calls = [marlin.experts(w, t) for w, t in zip(case.weights, inputs, strict=True)]
    if case.tokens <= 16:  # its order of INT4, and what is padded, are made here and not by vLLM
        error = errors(problem, calls[0]())[0]
        if not error <= MARLIN_ERROR:
            return [], f"Marlin's error is {error:.2e}: its weights are in a wrong order"
    return calls, ""


def triton_side(
    case: Case, kernels: TritonKernels, inputs: list[Tokens], problem: CudaProblem
) -> tuple[list[Call], str]:
    """The calls of triton_kernels in a case, and why they are not timed, or "". Its activation is another one."""
    from bench_cuda_sides import errors

    calls = [kernels.experts(w, t) for w, t in zip(case.weights, inputs, strict=True)]
    if case.tokens <= 16:
        error = errors(replace(problem, activation=kernels.activation), calls[0]())[0]
        if not error <= MARLIN_ERROR:
            return [], f"the error of triton_kernels is {error:.2e}"
    return calls, ""


def one_case(case: Case, out: Path, right: dict[str, bool], peers: Peers, ceilings: dict[str, float]) -> None:
    """Time all sides of one case, print a line per side, append the record."""
    from bench_cuda_cases import floor_us, is_int4, make_tokens, problem_of
    from bench_cuda_sides import errors, family_of, our_call, our_call_from_logits, variants_for
    from bench_cuda_timing import summary, time_interleaved

    vllm, deep_gemm, marlin, triton_kernels, libraries, absent = peers
    shape, dtype, routing, tokens, weights = case.shape, case.dtype, case.routing, case.tokens, case.weights
    inputs = [make_tokens(shape, tokens, routing, seed=1000 * tokens + s) for s in range(len(weights))]
    four_bits = dtype == "mxfp4" or is_int4(dtype)
    problems = [problem_of(w, t) for w, t in zip(weights, inputs, strict=True)]
    sides: dict[str, list[Call]] = {}
    found: dict[str, tuple[list[Call], str]] = {}
    as_vllm = triton_kernels if shape.name.startswith(GPT_OSS) and dtype == "mxfp4" else None
    if as_vllm is not None:
        found["vllm"] = triton_side(case, as_vllm, inputs, problems[0])
        sides[CHOICE] = [as_vllm.choice(w, t) for w, t in zip(weights, inputs, strict=True)]
    if marlin is not None and four_bits:
        found["vllm" if as_vllm is None else "marlin"] = marlin_side(case, marlin, inputs, problems[0])
    sides |= {name: calls for name, (calls, _) in found.items() if calls}
    absent = absent | {name: why_not for name, (_, why_not) in found.items() if why_not}
    if vllm is not None and not four_bits:
        sides["vllm"] = [vllm.experts(w, t) for w, t in zip(weights, inputs, strict=True)]
        if tokens <= 16:
            sides["vllm gate+experts"] = [vllm.layer(w, t, shape) for w, t in zip(weights, inputs, strict=True)]
    if deep_gemm is not None and dtype == "fp8" and tokens >= DEEP_GEMM_FROM_TOKENS:
        sides["deep_gemm"] = [deep_gemm.experts(w, t) for w, t in zip(weights, inputs, strict=True)]
    for variant in variants_for(problems[0]):
        if right[family_of(variant, dtype)]:
            sides[str(variant)] = [our_call(p, variant) for p in problems]
    if tokens <= 16 and right["direct"] and not four_bits:
        sides["flash_dmoe from logits"] = [
            our_call_from_logits(w, t, shape) for w, t in zip(weights, inputs, strict=True)
        ]
    peer_errors: dict[str, float] = {}
    if libraries:
        from bench_cuda_peers import PeerCase, add_peers

        error_of = lambda out: errors(problems[0], out)[0]  # noqa: E731
        peer_errors, missing = add_peers(libraries, PeerCase(shape, dtype, weights, inputs), sides, error_of)
        absent = absent | missing
    samples = time_interleaved(sides)
    rates = {"bytes_per_s": ceilings["copy_bytes_per_s"], "flops_per_s": ceilings["bf16_flops_per_s"]}
    floors = [floor_us(shape, t, dtype=dtype, **rates) for t in inputs]
    floor = sum(floors) / len(floors)
    medians = {name: summary(times) for name, times in samples.items()}
    record = {
        "shape": vars(shape), "dtype": dtype, "routing": routing, "tokens": tokens,
        "floor_us": floor, "sides": {name: {**medians[name], "samples_us": times} for name, times in samples.items()},
        **({"errors": peer_errors, "absent": absent} if peer_errors or absent else {}),
    }  # fmt: skip
    with (out / "timings.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    for name, side in medians.items():
        stock = "vllm gate+experts" if name.startswith("flash_dmoe") else "vllm"
        ratio = f"{medians[stock]['median_us'] / side['median_us']:8.2f}" if stock in samples else " " * 8
        print(f"{shape.name:18} {record['dtype']:5} {routing:7} {tokens:5d} {name:28} {side['median_us']:9.1f}"
              f" {floor / side['median_us']:6.0%} {ratio}", flush=True)  # fmt: skip
    for name, why in absent.items():
        print(f"{shape.name:18} {dtype:5} {routing:7} {tokens:5d} {name:28} absent: {why}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
