"""What each optimization of the embedded engine is worth: from a naive loop up, one added at a time.

    python benchmarks/engine/ablation.py examples/tiny-moe --dtype float32 [--write]
    python benchmarks/engine/ablation.py qwen3-moe-0.3b --num-requests 16    # a shape of workload.py, random weights

The naive loop computes the whole text again for each token, one request after the other. Each rung runs in a process
of its own, `--turns` times, and rungs that a device lacks are left out. A rung whose outputs differ from the naive
loop's is an error, except behind an optimization that changes rounding (fused experts, compile, CUDA graphs, FP8): the
share of equal tokens is shown. The first two rungs run on `--naive-requests` of the requests, as speed per token does
not depend on how many.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engine.own_process import in_own_process  # noqa: E402
from benchmarks.engine.workload import Request, model_folder, peak_bytes, random_requests  # noqa: E402
from benchmarks.record import cpu_name, cpu_slug, gpu_environment, head, host, packages, parser_of, write_record  # noqa: E402

Outputs = list[list[int]]
NAIVE = {
    "fused_moe": False, "attention_backend": "sdpa_padded", "enforce_eager": True, "compile_layers": False,
    "enable_prefix_caching": False, "enable_chunked_prefill": False,
}  # fmt: skip
# Name, what it adds to the arguments of the engine, how requests are handed over, whether it may change rounding,
# whether it needs a GPU.
RUNGS: tuple[tuple[str, dict[str, Any], str, bool, bool], ...] = (
    ("naive loop", {}, "whole text", False, False),
    ("kv_cache", {}, "one by one", False, False),
    ("static batches", {}, "batches", False, False),
    ("continuous_batching", {}, "together", False, False),
    ("packed prefill", {"attention_backend": "sdpa"}, "together", False, False),
    ("chunked_prefill", {"enable_chunked_prefill": True}, "together", False, False),
    ("prefix_caching", {"enable_prefix_caching": True}, "together", False, False),
    ("fused_moe", {"fused_moe": True}, "together", True, False),
    ("attention backend", {"attention_backend": "auto"}, "together", True, True),
    ("gpu_sampler", {}, "together", False, True),
    ("compile", {"compile_layers": True}, "together", True, True),
    ("cuda_graphs", {"enforce_eager": False}, "together", True, True),
    ("fp8", {"quantization": "fp8"}, "together", True, False),
)
_BATCH = 8


def main() -> None:
    """Climb, print a table, and with --write store a record."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("model", help="folder, or a shape of workload.py")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--naive-requests", type=int, default=4)
    parser.add_argument("--input-len", type=int, nargs=2, default=(16, 64), metavar=("LEAST", "MOST"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(16, 64), metavar=("LEAST", "MOST"))
    parser.add_argument("--shared", type=int, default=32, help="tokens that all prompts begin with")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name not in ("write", "commit")}
    import torch

    load_before = os.getloadavg()[0]
    on_gpu = args.device.startswith("cuda") or (args.device == "auto" and torch.cuda.is_available())
    arguments, rungs, first = dict(NAIVE), [], None
    print(f"{'':22}{'tokens/s':>10}{'x before':>10}{'x naive':>10}{'peak MB':>10}{'equal':>8}")
    for name, added, how, rounds, needs_gpu in RUNGS:
        if needs_gpu and not on_gpu:
            print(f"{name:22}{'needs a GPU':>10}")
            continue
        arguments |= added
        host_sampler = on_gpu and name in [rung[0] for rung in RUNGS[:9]]
        rung = in_own_process(_climb, settings, arguments, how, host_sampler=host_sampler)
        first = first or rung
        rate, before = rung["tokens_per_s"], (rungs or [rung])[-1]["tokens_per_s"]
        equal = _equal(first["outputs"], rung["outputs"])
        if equal < 1 and not rounds and not any(each["rounds"] for each in rungs):
            raise SystemExit(f"{name}: {1 - equal:.1%} of the tokens differ from the naive loop's")
        line = f"{rate:>10.1f}{rate / before:>10.2f}{rate / first['tokens_per_s']:>10.2f}"
        print(f"{name:22}{line}{rung['peak_bytes'] / 1e6:>10.0f}{equal:>8.1%}", flush=True)
        rungs.append({"name": name, "added": added, "requests": how, "rounds": rounds, **rung, "equal": equal})
    for rung in rungs:
        del rung["outputs"]
    record = {**head("what each optimization of the embedded engine adds, from a naive loop up", args.commit),
              "environment": {**host(load_before), **(gpu_environment() if on_gpu else {}),
                              "packages": packages("torch", "transformers")},
              "settings": settings, "rungs": rungs}  # fmt: skip
    if args.write:
        machine = torch.cuda.get_device_name().split()[1].lower() if on_gpu else cpu_slug(cpu_name())
        write_record(record, machine, f"engine_ablation_{Path(args.model).name}")


def _equal(want: Outputs, got: Outputs) -> float:
    pairs = [pair for ours, theirs in zip(got, want, strict=False) for pair in zip(ours, theirs, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)


def _climb(settings: dict[str, Any], arguments: dict[str, Any], how: str, *, host_sampler: bool) -> dict[str, Any]:
    """Return the speed, the peak of memory and the outputs of one rung."""
    from moe_optimizer.engine import LLM

    inputs, outputs, shared = tuple(settings["input_len"]), tuple(settings["output_len"]), settings["shared"]
    longest = shared + inputs[1] + outputs[1] + 1
    with tempfile.TemporaryDirectory() as folder:
        name, load_format = model_folder(settings["model"], Path(folder))
        llm = LLM(
            name, load_format=load_format, skip_tokenizer_init=True, dtype=settings["dtype"], device=settings["device"],
            max_model_len=longest, max_num_batched_tokens=max(2048, longest), **arguments,
        )  # fmt: skip
    if host_sampler:
        _sample_on_host(llm)
    vocab_size = llm.llm_engine.config.hf_config.vocab_size
    requests = random_requests(settings["num_requests"], inputs, outputs, vocab_size, shared=shared)
    if how in ("whole text", "one by one"):
        requests = requests[: settings["naive_requests"]]
    hand_over: Callable[[Any, list[Request]], Outputs] = {
        "whole text": _whole_text, "one by one": _one_by_one, "batches": _batches, "together": _together,
    }[how]  # fmt: skip
    _together(llm, [Request(each.prompt[::-1], 4) for each in requests[:4]])
    samples, tokens, found = [], sum(each.num_output for each in requests), []
    for _ in range(settings["turns"]):
        started = time.perf_counter()
        found = hand_over(llm, requests)
        samples.append(time.perf_counter() - started)
    rate = tokens / statistics.median(samples)
    return {"tokens_per_s": rate, "tokens": tokens, "seconds": samples, "peak_bytes": peak_bytes(), "outputs": found}


def _together(llm: Any, requests: list[Request]) -> Outputs:
    from moe_optimizer.engine import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=each.num_output, ignore_eos=True, detokenize=False)
        for each in requests
    ]
    outputs = llm.generate([{"prompt_token_ids": each.prompt} for each in requests], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def _one_by_one(llm: Any, requests: list[Request]) -> Outputs:
    return [_together(llm, [each])[0] for each in requests]


def _batches(llm: Any, requests: list[Request]) -> Outputs:
    """A few at a time: the next begin when the longest has ended."""
    starts = range(0, len(requests), _BATCH)
    return [output for start in starts for output in _together(llm, requests[start : start + _BATCH])]


def _whole_text(llm: Any, requests: list[Request]) -> Outputs:
    """Without a cache: one token of the whole text, again and again."""
    outputs = []
    for each in requests:
        output: list[int] = []
        for _ in range(each.num_output):
            output += _together(llm, [Request(each.prompt + output, 1)])[0]
        outputs.append(output)
    return outputs


def _sample_on_host(llm: Any) -> None:
    import torch

    from moe_optimizer.engine.sampler import TorchSampler

    sampler = TorchSampler(torch.device("cpu"), 0)

    class HostSampler:
        def sample(self, logits: torch.Tensor, sequences: list[Any]) -> list[Any]:
            return sampler.sample(logits.cpu(), sequences)

    llm.llm_engine.executor.sampler = HostSampler()


if __name__ == "__main__":
    main()
