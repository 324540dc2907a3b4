"""Trial of forms of grouped-mxfp4: right first, then times. trial.py OUT BUDGET_S COMMIT"""
import json, sys, time, traceback
from pathlib import Path
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import torch
from bench_cuda_cases import SHAPES, TINY_INT4, TINY_MXFP4, floor_us, make_tokens, make_weights, problem_of
from bench_cuda_sides import error_bound, errors, find_marlin, our_call
from bench_cuda_timing import device_facts, measure_ceilings, summary, time_interleaved
from moe_optimizer.ops import cuda_dispatch
from moe_optimizer.ops.cuda_variants import variant_named
out, budget, commit = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
end = time.monotonic() + budget
NAMES = {"n64": "t0", "n64/100": "t1"}
rights, cases = [], []
facts = {"commit": commit, "command": sys.argv, "environment": device_facts(), **measure_ceilings()}
def keep(): out.write_text(json.dumps({**facts, "checks": rights, "cases": cases}))
def check(shape, dtype, counts, names):
    weights = make_weights(shape, dtype, seed=1)
    for tokens in counts:
        problem = problem_of(weights, make_tokens(shape, tokens, "uniform", seed=tokens))
        for name in names:
            variant = variant_named("grouped-" + name)
            got = []
            for _ in range(2):
                problem.out.fill_(float("nan")); cuda_dispatch.run(problem, variant); torch.cuda.synchronize(); got.append(problem.out.clone())
            error, torch_error = errors(problem, got[0])
            good = torch.equal(*got) and error <= error_bound(variant, torch_error)
            rights.append([shape.name, dtype, tokens, name, error, torch_error, good])
            if not good or tokens == counts[-1]: print("check", shape.name, dtype, tokens, name, f"{error:.4f} {torch_error:.4f}", "right" if good else "WRONG", flush=True)
    keep()
FORMS = ["mxfp4-" + n for n in ("n64/100", "n96/100", "n128/100", "n128x2", "n128x2/100")] + [f"mxfp4_weights-n{n}/1200" for n in (16, 32, 64)]
INT4 = [f"int4_weights-n{n}/1200" for n in (16, 32, 64)]
check(TINY_MXFP4, "mxfp4", (8, 40, 130, 700), FORMS)
for dtype in ("int4_g32z", "int4_g128"): check(TINY_INT4, dtype, (8, 40, 130), INT4)
check(SHAPES["qwen3-30b-a3b"], "mxfp4", (33, 1100), FORMS)
check(SHAPES["qwen3-30b-a3b"], "int4_g128", (33,), INT4)
marlin = find_marlin()[0]
def time_them(shape_name, dtype, tokens, weights, names, peer=False):
    if time.monotonic() > end: return
    try:
        shape = SHAPES[shape_name]
        inputs = [make_tokens(shape, tokens, "uniform", seed=1000 * tokens + s) for s in range(len(weights))]
        problems = [problem_of(w, t) for w, t in zip(weights, inputs)]
        sides = {n: [our_call(p, variant_named(n if n == "direct" else "grouped-" + n)) for p in problems] for n in names}
        if peer and marlin: sides["marlin"] = [marlin.experts(w, t) for w, t in zip(weights, inputs)]
        samples = time_interleaved(sides)
        rates = {"bytes_per_s": facts["copy_bytes_per_s"], "flops_per_s": facts["bf16_flops_per_s"]}
        floor = floor_us(shape, inputs[0], dtype=dtype, **rates)
        cases.append({"shape": shape_name, "dtype": dtype, "tokens": tokens, "floor_us": floor, "samples_us": samples})
        print(f"{shape_name} {dtype} T={tokens} floor {floor:.0f}: " + "  ".join(f"{n} {summary(s)['median_us']:.1f}" for n, s in samples.items()), flush=True)
        keep()
    except Exception: traceback.print_exc()
M, W, ALL = "mxfp4-", "mxfp4_weights-", []
def sets(name, dtype): return [make_weights(SHAPES[name], dtype, seed=s) for s in range(8)]
w = sets("qwen3-30b-a3b", "mxfp4")
TIMING = [M + f"n128/{t}00" for t in range(2, 7)]
time_them("qwen3-30b-a3b", "mxfp4", 4096, w, [M + "n128", M + "n128/100", M + "n128x2", M + "n128x2/100", W + "n128", *TIMING])
time_them("qwen3-30b-a3b", "mxfp4", 8192, w, [M + "n128", M + "n128/100", M + "n128x2/100", W + "n128", *TIMING])
for t in (2048, 1024, 512):
    time_them("qwen3-30b-a3b", "mxfp4", t, w, [M + "n128", M + "n128/100", M + "n96", M + "n96/100", M + "n64", M + "n64/100", W + "n64", W + "n128"])
time_them("qwen3-30b-a3b", "mxfp4", 256, w, [M + "n64", M + "n64/100", W + "n32", W + "n64"])
AHEAD = [W + f"n{n}{form}" for n in (16, 32) for form in ("", "/1200")]
time_them("qwen3-30b-a3b", "mxfp4", 64, w, [*AHEAD, W + "n16/3", *[W + f"n16/{n}00" for n in range(7, 12)]], peer=True)
time_them("qwen3-30b-a3b", "mxfp4", 16, w, [*AHEAD, *[W + f"n16/{n}00" for n in range(7, 12)]], peer=True)
for t in (32, 128): time_them("qwen3-30b-a3b", "mxfp4", t, w, AHEAD, peer=True)
for t in (256, 512): time_them("qwen3-30b-a3b", "mxfp4", t, w, [*AHEAD[2:], W + "n64", W + "n64/1200"], peer=True)
for t in (4, 8, 2): time_them("qwen3-30b-a3b", "mxfp4", t, w, ["direct", W + "n16", W + "n16/1200"], peer=True)
for t in (4096, 2048, 1024): time_them("qwen3-30b-a3b", "mxfp4", t, w, [M + "n128/100"], peer=True)
del w; torch.cuda.empty_cache()
f = sets("qwen3-30b-a3b", "fp8")
for t in (4096, 8192, 2048, 1024, 512): time_them("qwen3-30b-a3b", "fp8", t, f, ["fp8-n144", "fp8-n144x2", "fp8-n96"] if t > 512 else ["fp8-n64", "fp8-n96"])
del f; torch.cuda.empty_cache()
i = sets("qwen3-30b-a3b", "int4_g128")
for t in (64, 16, 256, 32, 128): time_them("qwen3-30b-a3b", "int4_g128", t, i, [f"int4_weights-n{n}{form}" for n in (16, 32, 64) for form in ("", "/1200") if n < 64 or t > 128], peer=True)
del i; torch.cuda.empty_cache()
g = sets("gpt-oss-120b", "mxfp4")
for t in (4096, 2048, 1024, 8192): time_them("gpt-oss-120b", "mxfp4", t, g, [M + "n128", M + "n128/100", M + "n96/100", M + "n64/100", W + "n128"])
keep()
