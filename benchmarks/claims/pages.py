"""Lists the numbers of the pages in docs other than those of passes, of kernels and docs/kernel_speeds.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.claims.claim import Claim, Table
from benchmarks.claims.fewer_bytes import sparsity
from benchmarks.claims.kernels import largest_error
from benchmarks.claims.passes import PROMPT_STEPS

_ABLATION_GPU = "2026-11-26_h100_engine_ablation_qwen3-moe-0.3b"
_ABLATION = "2026-11-26_epyc_engine_ablation_tiny-moe"
_THROUGHPUT = "2026-11-26_epyc_engine_throughput_tiny-moe"
_THROUGHPUT_MOE = "2026-11-26_epyc_engine_throughput_qwen3-moe-0.3b"
_THROUGHPUT_DENSE = "2026-11-26_xeon_engine_throughput_qwen3-0.6b"
_STARTUP = "2026-11-23_epyc_cli_startup"
_STEP = "2026-11-26_epyc_engine_scheduler_step"
_DECODE = "2026-11-26_epyc_engine_decode_bandwidth"
_CHECKS = "2026-11-20_h200_checks"
_SPARSITY = "2026-11-20_epyc_sparsity_24"
_ENGINE_H100, _ENGINE_BOTH = "2026-11-23_h100_engine_throughput", "2026-11-25_h100_engine_throughput"
_FOUR_GPUS = "2026-11-26_h100_x4_layouts"
_TWO_GPUS = "2026-11-28_h100_x2_layouts_tp2_api_servers"
_ENGINE_ASYNC = "2026-11-26_h200_engine_throughput"
_CPU_STARTS = ("2026-11-27_xeon_starts",)
_STARTS, _FIRST_MINUTES = ("2026-11-26_h100_starts", "2026-11-26_h200_starts"), "2026-11-26_h100_first_minutes_16"
_MINUTES_OF_64, _MINUTES_IN_TURNS = "2026-11-28_h100_first_minutes_64", "2026-11-28_h100_first_minutes_64_in_turns"
_MINUTES_IN_FP8 = "2026-11-28_h200_first_minutes_64_fp8"
_MINUTES_AGGRESSIVE = "2026-11-29_h200_first_minutes_64_aggressive"
_ONE_GPU_SERVERS = "2026-11-29_h200_four_bit_api_servers"


def _turns(found: Any) -> list[float]:
    """The ratios to vLLM, with the least and the most of a turn behind the first."""
    pairs = zip(found["samples"]["engine"], found["samples"]["vllm"], strict=True)
    turns = [ours / theirs for ours, theirs in pairs]
    first, *others = found["ratios"].values()
    return [first, min(turns), max(turns), *others]


def _decode_bandwidth(found: Any) -> list[float]:
    """The share of a median turn, of the least and of the largest, in percent; the median bandwidth in GB/s."""
    turns = found["share"]["turns"]
    shares = [100 * each for each in (found["share"]["median"], min(turns), max(turns))]
    return [*shares, statistics.median(found["read_bandwidth_bytes_per_s"]) / 1e9]


def _decodes(record: Any) -> list[float]:
    return [
        side[f"ms_per_token_at_{requests}"]["median"]
        for side in record["results"]["decode"].values()
        for requests in (1, 64)
    ]


def _step_of_256(record: Any) -> list[float]:
    (step,) = [each for each in record["steps"] if each["batch"] == 256]
    (attention,) = [each["ms"] for each in step["kernels"] if each["name"] == "_attend"]
    return [step["step_ms"], step["gpu_idle_ms"], attention]


def _nano_ways(record: Any) -> list[float]:
    sides = record["results"]["nano"]
    ways = (sides["engine"], sides["engine"]["host_waits"], sides.get("engine-triton"), sides["vllm"])
    return [way["output_tokens_per_s"] for way in ways if way]


_RUNGS = {
    "naive loop": "naive loop", "KV cache": "kv_cache", "batches of 8 that wait for their longest": "static batches",
    "continuous batching": "continuous_batching", "packed prompts": "packed prefill",
    "chunked prefill": "chunked_prefill", "prefix caching": "prefix_caching", "our expert kernel": "fused_moe",
    "attention that reads pages in place": "attention backend", "FP8 experts": "fp8",
    "sampling on the device": "gpu_sampler", "torch.compile": "compile", "CUDA graphs": "cuda_graphs",
    "asynchronous scheduling": "async_scheduling",
}  # fmt: skip
"""What the page calls them."""


def _rungs(record: Any, label: str, _claimed: str) -> list[float]:
    rates = _rates(record)
    if label == "all but FP8":
        return [rates["async_scheduling"], rates["async_scheduling"] / rates["naive loop"]]
    if _RUNGS.get(label) not in rates:
        return []
    place = list(rates).index(_RUNGS[label])
    rate, peak = rates[_RUNGS[label]], record["rungs"][place]["peak_bytes"] / 1e6
    return [rate, rate / list(rates.values())[max(0, place - 1)], rate / rates["naive loop"], peak]


def _rung_spread(record: Any) -> list[float]:
    """How many times the fastest turn the slowest took, the most of a rung but FP8's, and FP8's."""
    *spreads, fp8 = [max(rung["seconds"]) / min(rung["seconds"]) for rung in record["rungs"]]
    return [max(spreads), fp8]


def _rates(record: Any) -> dict[str, float]:
    """Tokens per second of each rung, by its name."""
    return {rung["name"]: rung["tokens_per_s"] for rung in record["rungs"]}


def _cache(record: Any) -> list[float]:
    """What the KV cache is worth, and the fewest and most tokens of a text."""
    how = record["settings"]
    tokens = [how["shared"] + how["input_len"][end] + how["output_len"][end] for end in (0, 1)]
    return [_rates(record)["kv_cache"] / _rates(record)["naive loop"], *tokens]


def _starts(found: Any, side: str) -> list[Any]:
    return [each for each in found["starts"] if each["side"] == side]


def _ends(values: Iterable[float]) -> list[float]:
    known = list(values)
    return [min(known), max(known)]


def _start(h100: Any, h200: Any, label: str) -> list[float]:
    gpu, _, start = label.partition(", ")
    found, number = h100 if gpu == "H100" else h200, ("first", "second").index(start)
    ours = _starts(found, "ours")[number]
    return [_starts(found, "vllm")[number]["ready_s"], ours["ready_s"], ours["phases_s"]["warm-up"]]


def _cpu_start(found: Any, label: str) -> list[float]:
    number = ("first", "second", "third").index(label)
    ours = _starts(found, "ours")[number]
    return [_starts(found, "vllm")[number]["ready_s"], ours["ready_s"], ours["phases_s"]["warm-up"]]


def _cpu_phases(found: Any, phase: str, side: str, turns: slice) -> list[float]:
    return [each["phases_s"][f"vLLM answers: {phase}"] for each in _starts(found, side)[turns]]


def _importing(found: Any) -> list[float]:
    took = [
        sorted(each["phases_s"]["vLLM answers: importing vLLM"] for each in _starts(found, side))
        for side in ("ours", "vllm")
    ]
    return [*took[0], *took[1]]


def _starts_of_ours(found: Any) -> list[float]:
    first, second, third = _starts(found, "ours")
    phases = [first["phases_s"][name] for name in ("warm-up", "vLLM answers: importing vLLM")]
    return [*phases, *(each["ready_s"] for each in (first, second, third))]


def _loaded(found: Any, side: str) -> Any:
    return _starts(found, side)[0]["load"]


def _first_tokens(found: Any, side: str) -> float:
    """The median time to the first token of the requests that all clients began with, in ms."""
    load = _loaded(found, side)
    return statistics.median(ttft_ms for _, ttft_ms, *_ in load["requests"][: load["clients"]])


def _after_the_first_tokens(found: Any, side: str) -> float:
    """The 99th percentile of the times to the first token in the first minute without those, in ms."""
    load = _loaded(found, side)
    others = [ttft_ms for sent_s, ttft_ms, *_ in load["requests"][load["clients"] :] if sent_s < 60]
    return statistics.quantiles(others, n=100, method="inclusive")[98]


def _minutes(found: Any) -> list[float]:
    """The least and the largest ratio of a minute: output tokens per second, then TPOT."""
    minutes = list(zip(_loaded(found, "ours")["stretches"], _loaded(found, "vllm")["stretches"], strict=True))
    tokens = [ours["output_tokens_per_s"] / stock["output_tokens_per_s"] for ours, stock in minutes]
    tpot = [stock["tpot_ms_median"] / ours["tpot_ms_median"] for ours, stock in minutes]
    return [min(tokens), max(tokens), min(tpot), max(tpot)]


def _starts_and_imports(found: Any) -> list[float]:
    """Seconds to ready of ours and of vLLM, then of importing."""
    starts = [_starts(found, side)[0] for side in ("ours", "vllm")]
    imports = [each["phases_s"]["vLLM answers: importing vLLM"] for each in starts]
    return [*(each["ready_s"] for each in starts), *imports]


def _within_which_99_came(found: Any) -> list[float]:
    """99th percentiles of ours and of vLLM in the first and in the second minute; the least and the most of the others
    of each.
    """
    ours, stock = ([each["ttft_ms_p99"] for each in _loaded(found, side)["stretches"]] for side in ("ours", "vllm"))
    return [ours[0], stock[0], ours[1], stock[1], *_ends(ours[2:]), *_ends(stock[2:])]


def _of_one_gpu(found: Any) -> list[float]:
    """Tokens/s of 256 and of 512 clients with one API server, each behind its number of clients, then with four."""
    rates = {
        (side["name"], load["clients"]): load["output_tokens_per_s"]
        for bench in found["benches"] for side in bench["sides"] for load in side["loads"]
    }  # fmt: skip
    return [rates["one", 256], 256, rates["one", 512], 512, rates["four", 256], rates["four", 512]]


def _with_512_clients(found: Any) -> list[float]:
    """Tokens/s of slices with one API server, with four in two starts, times per token, and both of replicas."""
    loads = {name: layout["loads"][-1] for name, layout in found["layouts"].items()}
    one, four, replicas = (loads[name] for name in ("tp4", "tp4 --api-server-count 4", "tp2x2"))
    first = found["first_start"]["tp4 --api-server-count 4"]["loads"][-1]
    rates = [each["output_tokens_per_s"] for each in (one, four, first)]
    times = [each["tpot_ms"]["median"] for each in (four, first, one)]
    return [*rates, *times, replicas["output_tokens_per_s"], replicas["tpot_ms"]["median"]]


def _of_two_gpus(found: Any) -> list[float]:
    """Tokens/s and time per token of slices with one API server, then with four."""
    loads = [found["layouts"][name]["loads"][0] for name in ("tp2", "tp2 --api-server-count 4")]
    return [each for load in loads for each in (load["output_tokens_per_s"], load["tpot_ms"]["median"])]


def _prompt_steps_ms(plain: Any, graphs: Any) -> list[float]:
    """Wall time and kernels of 1024 tokens, the wall time with a graph of that size, and that of 8192 tokens."""
    short, long = (plain["prompts"][tokens] for tokens in ("1024", "8192"))
    times_us = [short["us"], short["kernels_us"], graphs["prompts"]["1024"]["us"], long["us"]]
    return [each / 1e3 for each in times_us]


def _with_128_clients(found: Any) -> list[float]:
    """Tokens/s of slices with four API servers, and with one."""
    layouts = [found["layouts"][name]["loads"] for name in ("tp4 --api-server-count 4", "tp4")]
    return [next(each for each in loads if each["clients"] == 128)["output_tokens_per_s"] for loads in layouts]


CLAIMS = [
    Claim("docs/layouts.md", "had {9,613} tokens/s with one API server, and with four\n(`--api-server-count 4`) "
          "{9,645} in one start and {12,363} in another; in both each token came sooner, in {30.9} and {27.0} ms in "
          "place of {35.7}. Two servers of two\nGPUs, which have one each, had {14,560} and {23.2} ms", (_FOUR_GPUS,),
          _with_512_clients),
    Claim("docs/layouts.md", "slices had {8,272} tokens/s and {41.4} ms with one, {9,030} and {35.7} ms with four",
          (_TWO_GPUS,), _of_two_gpus),
    Claim("docs/layouts.md", "one API server had {9,070} tokens/s of {256} clients and {9,394} of {512}, and four "
          "{8,971} and {9,600}", (_ONE_GPU_SERVERS,), _of_one_gpu),
    Claim("docs/layouts.md", "and four had {7,110} tokens/s in place of {6,594}", (_FOUR_GPUS,), _with_128_clients),
    Claim("docs/layouts.md", "a prompt of 1024 tokens takes {91} ms, {31} of them in kernels, and {36} ms with a graph "
          "of\n  that size; 8192 tokens take {172}, and", PROMPT_STEPS, _prompt_steps_ms),
    Table("docs/engine.md", "| added |", "Two cores of an EPYC without", 2, (_ABLATION,), _rungs),
    Table("docs/engine.md", "| added on the GPU |", "they are below", 2, (_ABLATION_GPU,), _rungs),
    Claim("docs/engine.md", "took up to {2.0} times the second", (_ABLATION_GPU,),
          lambda found: [max(rung["seconds"][0] / rung["seconds"][1] for rung in found["rungs"])]),
    Claim("docs/engine.md", "are worth {7.9}x here", (_ABLATION_GPU,),
          lambda found: [_rates(found)["cuda_graphs"] / _rates(found)["compile"]]),
    Claim("docs/engine.md", "cost {0.31} of the rate", (_ABLATION_GPU,),
          lambda found: [1 - _rates(found)["gpu_sampler"] / _rates(found)["attention backend"]]),
    Claim("docs/engine.md", "of {164} to {320} prompt tokens and {32} to {48} output tokens", (_ABLATION_GPU,),
          lambda found: [found["settings"]["shared"] + each for each in found["settings"]["input_len"]]
          + found["settings"]["output_len"]),
    Claim("docs/engine.md", "differ by up to {1.3} times, and the first of FP8 took {3.4} times", (_ABLATION,),
          _rung_spread),
    Claim("docs/engine.md", "is {1.7}x over batches that wait, and {4.8}x over one request at a time", (_ABLATION,),
          lambda found: [_rates(found)["continuous_batching"] / _rates(found)[each]
                         for each in ("static batches", "kv_cache")]),
    Claim("docs/engine.md", "without FP8, is {93}x the naive loop, where 32x is claimed; {2.9}x of that", (_ABLATION,),
          lambda found: [_rates(found)["attention backend"] / _rates(found)["naive loop"],
                         _rates(found)["fused_moe"] / _rates(found)["prefix_caching"]]),
    Claim("docs/engine.md", "worth what the text is long: {3.9}x with the {64} to {160} tokens", (_ABLATION,), _cache),
    Claim("docs/engine.md", "FlashAttention made {1.03}x the\n  tokens/s of our Triton kernels", (_ENGINE_ASYNC,),
          lambda found: [_nano_ways(found)[0] / _nano_ways(found)[2]]),
    Claim("docs/engine.md", "alone is {1.11}x on an H100, {1.13}x on an H200",
          ("2026-11-26_h100_engine_throughput", _ENGINE_ASYNC),
          lambda *found: [_nano_ways(each)[0] / _nano_ways(each)[1] for each in found]),
    Claim("docs/engine.md", "{4691}; vLLM {3834}, with threads on every core {3662}; transformers one by one {219}, "
          "as one batch {851}", (_THROUGHPUT,), lambda found: list(found["output_tokens_per_s"].values())),
    Claim("docs/engine.md", "{1.23}x vLLM ({1.08} to {1.28}), {1.28}x with threads on every core; transformers {20.8}x "
          "and {5.9}x", (_THROUGHPUT,), _turns),
    Claim("docs/engine.md", "{0.28} ms; vLLM {0.52} ms, with threads on every core {0.50} ms", (_THROUGHPUT,),
          lambda found: list(found["cpu_ms_per_token"].values())[:3]),
    Claim("docs/engine.md", "{220}; vLLM {142}; transformers one by one {19}, as one batch {40}", (_THROUGHPUT_MOE,),
          lambda found: list(found["output_tokens_per_s"].values())),
    Claim("docs/engine.md", "{1.56}x vLLM ({1.47} to {1.65}); transformers {11.0}x and {5.3}x", (_THROUGHPUT_MOE,),
          _turns),
    Claim("docs/engine.md", "{8.0} ms; vLLM {12.4} ms", (_THROUGHPUT_MOE,),
          lambda found: list(found["cpu_ms_per_token"].values())[:2]),
    Claim("docs/engine.md", "{66}; vLLM {31}; transformers one by one {6.0}, as one batch {7.6}", (_THROUGHPUT_DENSE,),
          lambda found: list(found["output_tokens_per_s"].values())),
    Claim("docs/engine.md", "{2.15}x vLLM ({2.14} to {2.15}); transformers {10.4}x and {8.3}x", (_THROUGHPUT_DENSE,),
          _turns),
    Claim("docs/engine.md", "{27} ms; vLLM {59} ms", (_THROUGHPUT_DENSE,),
          lambda found: list(found["cpu_ms_per_token"].values())[:2]),
    Claim("docs/engine.md", "{6.4} s, at most {9.2} s; {5.6} s of processor time", (_STARTUP,),
          lambda found: [found["results"]["first token, embedded engine"][each]
                         for each in ("median_s", "max_s", "cpu_median_s")]),
    Claim("docs/engine.md", "| {19,381}; {17,445}; vLLM 0.26 {18,824} |", ("2026-11-26_h100_engine_throughput",),
          _nano_ways),
    Claim("docs/engine.md", "| {22,941}; {20,271}; {22,199}; vLLM 0.26 {23,336} |", (_ENGINE_ASYNC,),
          _nano_ways),
    Table("docs/usage.md", "| GPU, start |", "caches empty at first", 1, _STARTS, _start),
    Table("docs/usage.md", "| start |", "on two cores of a Xeon, vLLM 0.32", 1, _CPU_STARTS, _cpu_start),
    Claim("docs/usage.md", "importing took {61.3} s of it, and {32.0} s of its next", _CPU_STARTS,
          lambda found: _cpu_phases(found, "importing vLLM", "vllm", slice(2))),
    Claim("docs/usage.md", "{8.2} and {7.5} s of ours are compiling and sizing the cache, {18.2} and {17.6} s of stock",
          _CPU_STARTS,
          lambda found: [each for side in ("ours", "vllm")
                         for each in _cpu_phases(found, "compiling and sizing the cache", side, slice(1, None))]),
    Claim("docs/usage.md", "{16} to {17} s of a first warm-up", _STARTS,
          lambda *found: sorted(_starts(each, "ours")[0]["phases_s"]["warm-up: sampling"] for each in found)),
    Claim("docs/usage.md", "the\nfirst warm-up took {6.5} s. That machine was slower, imports took {45.3} s, "
          "and ours was ready after {114.8} s, the second time after {53.8} s, "
          "and in another process of the benchmark after\n{50.2} s",
          ("2026-11-26_h100_starts_ours",), _starts_of_ours),
    Claim("docs/usage.md", "took {16} to {33} s on the H100s, with stock vLLM {31} to {48}", _STARTS[:1], _importing),
    Claim("docs/usage.md", "ready after {51.4} s, stock vLLM after {58.5} s", (_FIRST_MINUTES,),
          lambda found: [_starts(found, side)[0]["ready_s"] for side in ("ours", "vllm")]),
    Claim("docs/usage.md", "took stock vLLM {1.1} s longer than", (_FIRST_MINUTES,),
          lambda found: [(_first_tokens(found, "vllm") - _first_tokens(found, "ours")) / 1000]),
    Claim("docs/usage.md", "{1.03}x to {1.04}x its output tokens per second, a TPOT {1.02}x to {1.03}x as short",
          (_FIRST_MINUTES,), _minutes),
    Claim("docs/usage.md", "within {125} ms (stock vLLM: {171} ms;", (_FIRST_MINUTES,),
          lambda found: [_after_the_first_tokens(found, side) for side in ("ours", "vllm")]),
    Claim("docs/usage.md", "ours after {147.9} s, stock vLLM after {166.2}", (_MINUTES_OF_64,),
          lambda found: [_starts(found, side)[0]["ready_s"] for side in ("ours", "vllm")]),
    Claim("docs/usage.md", "{0.99}x to {1.02}x the tokens per second and {1.00}x the TPOT", (_MINUTES_OF_64,),
          lambda found: _minutes(found)[:3]),
    Claim("docs/usage.md", "ours was ready after {138.4} s, a warm-up of {8.8} s\namong them, "
          "stock vLLM after {138.0}", (_MINUTES_IN_TURNS,),
          lambda found: [value for ours, stock in [(_starts(found, "ours")[0], _starts(found, "vllm")[0])]
                         for value in (ours["ready_s"], ours["phases_s"]["warm-up"], stock["ready_s"])]),
    Claim("docs/usage.md", "{1.01}x to {1.05}x the tokens per second and a TPOT {1.04}x as short",
          (_MINUTES_IN_TURNS,), lambda found: _minutes(found)[:3]),
    Claim("docs/usage.md", "ready after {95.2} s, importing took {32.8} s of it; the next after {46.2} s",
          ("2026-11-28_h200_starts_ours",),
          lambda found: [value for first, second in [_starts(found, "ours")] for value in
                         (first["ready_s"], first["phases_s"]["vLLM answers: importing vLLM"], second["ready_s"])]),
    Claim("docs/usage.md", "had {3,229} to {3,283} tokens per second in each of five minutes, the\nfirst included, a "
          "TPOT of {19.2} to {19.4} ms", ("2026-11-28_h200_first_minutes_64_ours",),
          lambda found: [each for key in ("output_tokens_per_s", "tpot_ms_median") for each in
                         _ends(stretch[key] for stretch in _loaded(found, "ours")["stretches"])]),
    Claim("docs/usage.md", "ours was ready after {155.5} s,\nvLLM after {172.6}", (_MINUTES_IN_FP8,),
          lambda found: [_starts(found, side)[0]["ready_s"] for side in ("ours", "vllm")]),
    Claim("docs/usage.md", "importing took {47.0} and {64.5} s of it", (_MINUTES_IN_FP8,),
          lambda found: [_starts(found, side)[0]["phases_s"]["vLLM answers: importing vLLM"]
                         for side in ("ours", "vllm")]),
    Claim("docs/usage.md", "{1.10}x to {1.13}x the tokens per second and a TPOT {1.12}x to {1.13}x as short",
          (_MINUTES_IN_FP8,), _minutes),
    Claim("docs/usage.md", "took it {497} ms, vLLM {2,217}", (_MINUTES_IN_FP8,),
          lambda found: [_loaded(found, side)["stretches"][0]["ttft_ms_most"] for side in ("ours", "vllm")]),
    Claim("docs/usage.md", "ours was ready after {157.9} s, vLLM after {172.4}, importing took {40.9} and {58.2} s",
          (_MINUTES_AGGRESSIVE,), _starts_and_imports),
    Claim("docs/usage.md", "{1.06}x to {1.10}x the tokens per second and a TPOT {1.09}x to {1.11}x as short",
          (_MINUTES_AGGRESSIVE,), _minutes),
    Claim("docs/usage.md", "within {449} ms in the first minute, with vLLM within {1,997}; in the\nsecond within {87} "
          "and {82}, later within {85} to {92} and {89} to {97}", (_MINUTES_AGGRESSIVE,), _within_which_99_came),
    Claim("docs/usage.md", "took it {179} ms, stock vLLM {1,230}", (_MINUTES_OF_64,),
          lambda found: [_loaded(found, side)["stretches"][1]["ttft_ms_most"] for side in ("ours", "vllm")]),
    Claim("docs/engine.md", "{4.45} and {25.3} ms; vLLM 0.26 {4.71} and {24.7} ms", (_ENGINE_BOTH,), _decodes),
    Claim("docs/engine.md", "{4.30} and {24.4} ms", (_ENGINE_H100,), _decodes),
    Claim("docs/engine.md", "{9.8} ms, {1.4} ms; attention {6.7} ms", ("2026-11-25_h100_engine_decode_step",),
          _step_of_256),
    Claim("docs/engine.md", "{36} us of thread time", (_STEP,),
          lambda found: [statistics.median(found["median_us_of_turns"])]),
    Claim("docs/engine.md", "{93} % of the read bandwidth ({81} to {122} % by turns), which is {18.9} GB/s", (_DECODE,),
          lambda found: _decode_bandwidth(found["results"]["qwen3-0.6b"])),
    Claim("docs/engine.md", "{70} % ({63} to {82} %), {18.2} GB/s", (_DECODE,),
          lambda found: _decode_bandwidth(found["results"]["qwen3-moe-0.3b"])),
    Claim("docs/hardware.md", "{733,558} | {732,496}", ("2026-11-20_h200_memory_plan",),
          lambda found: [found["predicted"]["kv_tokens"], found["measured"]["kv_tokens"]]),
    Claim("docs/kernel_speeds.md", "The error is {4.4} % of the norm, vLLM's {4.7} %", (_CHECKS,),
          lambda found: [largest_error(found, "grouped-fp8-"), largest_error(found, "vllm")]),
    Claim("docs/kernel_speeds.md", "keeps the tokens in BF16 ({0.3} %)", (_CHECKS,),
          lambda found: [largest_error(found, "direct", "grouped-fp8_weights")]),
    Claim("CHANGELOG.md", "{13} % more perplexity on the bundled model", (_SPARSITY,),
          lambda found: [sparsity(found, "2:4 by magnitude")[1]]),
]  # fmt: skip
