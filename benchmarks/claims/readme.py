"""Lists the numbers of README.md."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.claims.claim import Claim, cases
from benchmarks.claims.kernel_speeds import cpu_ratio, ours_us, vllm_us
from benchmarks.claims.passes import BESIDE_STOCK, PROMPT_STEPS, one_client_beside_stock, prompt_steps

_README = "README.md"
_TWO = "2026-11-21_h200_x2_served"
_H100, _LAYER, _CPU = (
    "2026-11-22_h100_served",
    "2026-11-21_h200_fused_experts",
    "2026-11-21_epyc-avx512_bf16_fused_experts",
)
_BALANCED, _AGGRESSIVE = "2026-11-26_h200_balanced_served", "2026-11-26_h200_aggressive_served"
_TUNED_PLAN = "2026-11-26_h200_tuned_plan_served"
_FOUR_BIT_KV = "2026-11-26_h200_four_bit_kv_cache_served"
_H100_FP8 = "2026-11-22_h100_fp8_served"
_FOUR_BIT = "2026-11-23_h100_four_bit_fp8_served"
_ONE_GPU = "2026-11-23_h100_fp8_one_gpu_served"
_BESIDE_GPTQ = "2026-11-28_h200_four_bit_beside_gptq"
_BESIDE_BF16 = "2026-11-28_h200_four_bit_beside_bf16"
_CHATS, _ROUTER = "2026-11-26_h100_balanced_chat", "2026-11-26_h100_router_served"
_MINUTES_IN_FP8 = "2026-11-28_h200_first_minutes_64_fp8"
_MINUTES_AGGRESSIVE = "2026-11-29_h200_first_minutes_64_aggressive"
_QUALITY, _MEMORY = "2026-11-20_h200_fp8_quality", "2026-11-20_h200_memory_plan"


def _tpot(record: Any, side: str, clients: int) -> float:
    return record["sides"][side]["loads"][str(clients)]["tpot_ms_median"]


def _pair(text: str, record: str, ours: str, stock: str, clients: int) -> Claim:
    def values(found: Any) -> list[float]:
        mine, other = _tpot(found, ours, clients), _tpot(found, stock, clients)
        return [mine, other, other / mine]

    return Claim(_README, text, (record,), values)


def _h100_pair(record: Any, clients: int) -> list[float]:
    mine, other = (
        load["tpot_ms"]["median"] for side in record["sides"] for load in side["loads"] if load["clients"] == clients
    )
    return [mine, other, other / mine]


def _verdict(record: Any, metric: str, clients: int) -> list[float]:
    """The ratio, and the ends of its interval."""
    (found,) = (
        each for each in record["verdicts"] if each["metric"] == metric and each["load"].split()[0] == str(clients)
    )
    assert found["verdict"] == "faster", found
    return [found["ratio"], found["low"], found["high"]]


def _beside(record: Any, number: int, metric: str, clients: int) -> list[float]:
    """Ours and stock vLLM's in one bench of several, the ratio, and the ends of its interval."""
    bench = record["benches"][number]
    values = {
        side["name"]: next(load[metric]["median"] for load in side["loads"] if load["clients"] == clients)
        for side in bench["sides"]
    }
    (ours,) = values.keys() - {"stock"}
    (found,) = (
        each for each in bench["verdicts"] if each["metric"] == metric and each["load"].split()[0] == str(clients)
    )
    # A verdict is about the first side.
    first = bench["sides"][0]["name"] == ours
    assert found["verdict"] == ("faster" if first else "slower"), found
    interval = [found["low"], found["high"]] if first else [1 / found["high"], 1 / found["low"]]
    return [values[ours], values["stock"], found["ratio"] if first else 1 / found["ratio"], *interval]


def _first_tokens(record: Any) -> list[float]:
    """Times to the first token in ms, ours and stock vLLM's: chats with 1 and 16 clients, long prompts with 1 and 8."""
    found = []
    for number, clients in ((1, 1), (1, 16), (0, 1), (0, 8)):
        for name in ("balanced", "stock"):
            (side,) = (each for each in record["benches"][number]["sides"] if each["name"] == name)
            found.append(next(load["ttft_ms"]["median"] for load in side["loads"] if load["clients"] == clients))
    return found


def _graphs(record: Any) -> list[float]:
    """Number, GiB and seconds of the graphs, and tokens of the cache: ours, then stock vLLM's."""
    ours, stock = (record["graphs"][side] for side in ("balanced", "stock"))
    found = [
        value
        for each in (ours, stock)
        for value in (
            each["piecewise"] + each["full"],
            each["piecewise_largest"],
            each["graphs_gib"],
            each["capture_s"],
        )
    ]
    return [*found, ours["cache_tokens"], stock["cache_tokens"]]


def _slowest_tokens(*records: Any) -> list[float]:
    """The least and the most 99th percentile of the time between tokens at 64 clients: of ours, of stock vLLM."""
    sides = [
        [
            load["itl_ms"]["p99"]
            for record in records
            for load in record["sides"][side]["loads"]
            if load["clients"] == 64
        ]
        for side in (0, 1)
    ]
    return [bound(side) for side in sides for bound in (min, max)]


def _over_minutes(found: Any, key: str) -> list[float]:
    """Return the medians over the minutes of ours and of vLLM's, and theirs over ours."""
    sides = {each["side"]: each["load"]["stretches"] for each in found["starts"]}
    ours, stock = (statistics.median(each[key] for each in sides[side]) for side in ("ours", "vllm"))
    return [ours, stock, stock / ours]


def _on_one_gpu(record: Any, clients: int) -> list[float]:
    """Ours and the first start of stock vLLM's own FP8."""
    stock, ours, _ = record["sides"]
    return _h100_pair({"sides": [ours, stock]}, clients)


def _beside_stock(ours: Any, stock: Any, clients: int) -> list[float]:
    return _h100_pair({"sides": [ours["sides"][0], stock["sides"][1]]}, clients)


def _tokens_per_s_gain(record: Any) -> float:
    ours, stock = (side["loads"][-1]["output_tokens_per_s"] for side in record["sides"])
    return ours / stock


def _gains(record: Any, dtype: str) -> list[float]:
    found = [
        vllm_us(case) / ours_us(case) for case in cases(record, shape="qwen3-30b-a3b", dtype=dtype, routing="uniform")
    ]
    return [min(found), max(found)]


def _cpu_gains(record: Any) -> list[float]:
    found = [cpu_ratio(case, "ours_bf16") for case in cases(record, shape="qwen3-30b-a3b", routing="uniform")]
    return [min(found), max(found)]


def _largest_change(record: Any) -> list[float]:
    base = record["results"]["BF16"]["perplexity"]
    largest = max(abs(each["perplexity"] / base - 1) for each in record["results"].values())
    assert largest < 0.01, largest
    return [1]


CLAIMS = [
    _pair("| BF16 | 1 | {3.32} / {3.95} | {1.19}x |", _TWO, "flash_dmoe", "stock", 1),
    _pair("| BF16 | 64 | {10.65} / {11.81} | {1.11}x |", _TWO, "flash_dmoe", "stock", 64),
    Claim(_README, "| BF16 | 1 | {3.58} / {3.79} | {1.06}x ({1.05} to {1.06}) |", (_BALANCED,),
          lambda found: [*_h100_pair(found, 1)[:2], *_verdict(found, "tpot_ms", 1)]),
    Claim(_README, "256: tokens per second {1.07}x ({1.03} to {1.11})", (_BALANCED,),
          lambda found: _verdict(found, "output_tokens_per_s", 256)),
    *(
        claim
        for record, text, what, fewer in (
            (_AGGRESSIVE, "| FP8 / BF16 | 64 | {10.91} / {17.14} | {1.59}x ({1.26} to {2.01}) |", "FP8 cache",
             "{1.19}x ({1.12} to {1.26}) and {1.56}x ({1.31} to {1.86})"),
            (_FOUR_BIT_KV, "| MXFP4 / BF16 | 64 | {10.05} / {17.23} | {1.67}x ({1.43} to {1.96}) |", "FP8 cache",
             "{1.09}x ({1.05} to {1.14}) and {1.59}x ({1.54} to {1.63})"),
            (_TUNED_PLAN, "| FP8 / BF16 | 64 | {10.74} / {17.98} | {1.68}x ({1.58} to {1.78}) |",
             "[plan of `tune`](benchmarks/records/2026-11-26_h200_tuned_plan_served.json)",
             "{1.23}x ({1.22} to {1.23}) and {1.61}x ({1.59} to {1.62})"),
        )
        for claim in (
            Claim(_README, text, (record,),
                  lambda found: [*_h100_pair(found, 64)[:2], *_verdict(found, "tpot_ms", 64)]),
            Claim(_README, f"{what}; 1 and 16 clients {fewer}", (record,),
                  lambda found: [*_verdict(found, "tpot_ms", 1), *_verdict(found, "tpot_ms", 16)]),
        )
    ),
    Claim(_README, "at 64 clients was {15} to {37} ms with our plans and {19} to {20} with stock vLLM",
          (_BALANCED, "2026-11-26_h200_single_h100_served", _AGGRESSIVE, _FOUR_BIT_KV), _slowest_tokens),
    Claim(_README, "without making a step wait, {13.8} and {21.7} ms", (_TUNED_PLAN,),
          lambda found: _slowest_tokens(found)[::2]),
    Claim(_README, "same; 8 clients {1.10}x |", (_TWO,),
          lambda found: [_tpot(found, "stock", 8) / _tpot(found, "flash_dmoe", 8)]),
    Claim(_README, "| BF16 | 1 to 8192 tokens | | {1.04}x to {1.45}x |", (_LAYER,),
          lambda found: _gains(found, "bf16")),
    Claim(_README, "| FP8 | 1 to 8192 tokens | | {1.12}x to {2.21}x |", (_LAYER,),
          lambda found: _gains(found, "fp8")),
    Claim(_README, "| BF16 | 1 | {4.50} / {4.81} | {1.07}x |", (_H100,), lambda found: _h100_pair(found, 1)),
    Claim(_README, "| BF16 | 1 | {4.24} / {4.68} | {1.12}x ({1.07} to {1.17}) |", (_ROUTER,),
          lambda found: _beside(found, 0, "tpot_ms", 1)),
    Claim(_README, "| BF16 | 1 | {3.66} / {4.50} | {1.23}x ({1.21} to {1.24}) |", (BESIDE_STOCK,),
          lambda found: one_client_beside_stock(found)[:5]),
    Claim(_README, "4 clients {1.09}x ({1.02} to {1.15}) |", (_ROUTER,),
          lambda found: _beside(found, 0, "tpot_ms", 4)[2:]),
    Claim(_README, "waited {92} ms for their first token and {169} ms with stock vLLM, {1.77}x ({1.16} to {2.71})",
          (_CHATS,), lambda found: _beside(found, 1, "ttft_ms", 64)),
    Claim("docs/passes/graph_capture.md", "after {92} ms in place of {169}, {1.77}x ({1.16} to {2.71})", (_CHATS,),
          lambda found: _beside(found, 1, "ttft_ms", 64)),
    Claim("docs/passes/graph_capture.md",
          "the {81} graphs of Qwen3-30B-A3B up to {3,584} tokens took {0.92} GiB and {11} s,", (_CHATS,),
          lambda found: _graphs(found)[:4]),
    Claim("docs/passes/graph_capture.md",
          "{86} up to {512} tokens took {0.63} GiB and {17} s; the cache then held {129,632} tokens in place of "
          "{136,560}",
          (_CHATS,), lambda found: _graphs(found)[4:]),
    Claim("docs/passes/graph_capture.md",
          "medians with one client {39} and {90} ms, with 16 clients {68} and {113}, for prompts of 2,048 tokens {58} "
          "and {112} with one and {239} and {317} with eight", (_CHATS,), _first_tokens),
    Claim("docs/passes/flash_dmoe.md", "{4.24} ms a token in place of {4.68} with one client, {1.12}x ({1.07} to "
          "{1.17}), {8.07} in place of {8.84} with four, {1.09}x ({1.02} to {1.15})", (_ROUTER,),
          lambda found: [*_beside(found, 0, "tpot_ms", 1), *_beside(found, 0, "tpot_ms", 4)]),
    Claim("docs/passes/flash_dmoe.md", "gave one client {382} and {363} tokens/s: no difference shown",
          ("2026-11-27_xeon_plain_vllm_serve",),
          lambda found: [side["loads"][0]["output_tokens_per_s"] for side in found["sides"]]),
    Claim("docs/passes/flash_dmoe.md", "({0.80}x to {1.33}x,", ("2026-11-27_xeon_plain_vllm_serve",),
          lambda found: next([each["low"], each["high"]] for each in found["verdicts"]
                             if each["metric"] == "output_tokens_per_s")),
    Claim("docs/passes/flash_dmoe.md", "it was {1.07}x ({1.03} to {1.11}) with one", (_CHATS,),
          lambda found: _beside(found, 1, "tpot_ms", 1)[2:]),
    Claim(_README, "| BF16 | 256 | {39.68} / {42.53} | {1.07}x |", (_H100,), lambda found: _h100_pair(found, 256)),
    Claim(_README, "16 clients {1.00}x, 64 clients {1.03}x", (_H100,),
          lambda found: [_h100_pair(found, 16)[2], _h100_pair(found, 64)[2]]),
    Claim(_README, "| FP8 / BF16 | 1 | {3.64} / {4.70} | {1.29}x |", (_H100_FP8,), lambda found: _h100_pair(found, 1)),
    Claim(_README, "| FP8 / BF16 | 256 | {24.95} / {42.24} | {1.69}x |", (_H100_FP8,),
          lambda found: _h100_pair(found, 256)),
    Claim(_README, "per second {2.05}x; 16 clients {1.62}x, 64 clients {1.68}x", (_H100_FP8,),
          lambda found: [_tokens_per_s_gain(found), _h100_pair(found, 16)[2], _h100_pair(found, 64)[2]]),
    Claim(_README, "| FP8 | 64 | {13.07} / {14.70} | {1.12}x |", (_MINUTES_IN_FP8,),
          lambda found: _over_minutes(found, "tpot_ms_median")),
    Claim(_README, "each side on an H200 of its own; tokens per second {1.12}x |", (_MINUTES_IN_FP8,),
          lambda found: [1 / _over_minutes(found, "output_tokens_per_s")[2]]),
    Claim(_README, "| FP8, FP8 cache | 64 | {13.73} / {15.16} | {1.10}x |", (_MINUTES_AGGRESSIVE,),
          lambda found: _over_minutes(found, "tpot_ms_median")),
    Claim(_README, "likewise; tokens per second {1.10}x |", (_MINUTES_AGGRESSIVE,),
          lambda found: [1 / _over_minutes(found, "output_tokens_per_s")[2]]),
    Claim(_README, "| FP8 | 1 | {3.54} / {4.16} | {1.17}x |", (_ONE_GPU,), lambda found: _on_one_gpu(found, 1)),
    Claim(_README, "16, 64 and 256 clients {1.04}x, {1.09}x and {1.18}x", (_ONE_GPU,),
          lambda found: [_on_one_gpu(found, clients)[2] for clients in (16, 64, 256)]),
    Claim(_README, "| MXFP4 + FP8 / BF16 | 16 | {8.04} / {16.29} | {2.03}x |", (_FOUR_BIT, _H100_FP8),
          lambda ours, stock: _beside_stock(ours, stock, 16)),
    Claim(_README, "1 client {1.34}x, 64 and 256 clients {2.02}x and {1.84}x", (_FOUR_BIT, _H100_FP8),
          lambda ours, stock: [_beside_stock(ours, stock, clients)[2] for clients in (1, 64, 256)]),
    Claim(_README, "| MXFP4 + FP8 / GPTQ | 1 | {3.09} / {4.13} | {1.34}x ({1.32} to {1.35}) |", (_BESIDE_GPTQ,),
          lambda found: _beside(found, 2, "tpot_ms", 1)),
    Claim(_README, "16 and 64 clients {1.06}x ({1.01} to {1.12}) and {1.19}x ({1.13} to {1.27}), tokens per second "
          "{1.13}x ({1.08} to {1.17}) and {1.20}x ({1.11} to {1.29})", (_BESIDE_GPTQ,),
          lambda found: [value for metric in ("tpot_ms", "output_tokens_per_s")
                         for number, clients in ((1, 16), (0, 64))
                         for value in _verdict(found["benches"][number], metric, clients)]),
    Claim(_README, "| MXFP4 + FP8 / BF16 | 64 | {10.32} / {19.81} | {1.97}x ({1.72} to {2.26}) |", (_BESIDE_BF16,),
          lambda found: _beside(found, 0, "tpot_ms", 64)),
    Claim(_README, "likewise; tokens per second {1.67}x ({1.58} to {1.77}); 1 and 16 clients {1.33}x ({1.33} to {1.34})"
          " and {1.77}x ({1.70} to {1.86})", (_BESIDE_BF16,),
          lambda found: [*_verdict(found["benches"][0], "output_tokens_per_s", 64),
                         *_verdict(found["benches"][2], "tpot_ms", 1), *_verdict(found["benches"][1], "tpot_ms", 16)]),
    Claim(_README, "| BF16 | 1 to 1024 tokens | | {1.16}x to {2.21}x |", (_CPU,), _cpu_gains),
    Claim(_README, "perplexity by less than {1} %", (_QUALITY,), _largest_change),
    Claim(_README, "on one H200 {0.14} % from vLLM's cache", (_MEMORY,),
          lambda found: [100 * (found["predicted_over_measured"]["kv_tokens"] - 1)]),
    Claim(_README, "{91} ms for 1,024 tokens\n({31} ms of kernels), with the CUDA graphs that plans capture for such "
          "steps {36} ms; {107} and {48} ms for 2,048", PROMPT_STEPS, prompt_steps),
]  # fmt: skip
