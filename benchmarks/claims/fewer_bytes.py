"""Lists the numbers of the pages of passes that store fewer bytes."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.claims.claim import Claim, Table
from benchmarks.claims.kernels import e4m3_beside_bf16, mxfp4_share

_SERVED = "2026-11-21_h200_served"
_QUALITY = ("2026-11-20_h200_fp8_quality", "2026-11-21_h200_fp8_quality_wide")
_SPARSITY = "2026-11-20_epyc_sparsity_24"
_FOUR_BIT = "2026-11-24_epyc_four_bit"
_FOUR_BIT_SERVED = "2026-11-23_h100_four_bit_served"
_MXFP4 = "2026-11-23_h100_mxfp4_experts"
_E4M3 = "2026-11-26_h100_mxfp4_in_e4m3"
_E4M3_TOKENS = "2026-11-26_xeon_e4m3_tokens_quality"
_JUDGED = "2026-11-26_h100_judged_formats"
_H100 = "2026-11-22_h100_served"
_KV_CACHE = "2026-11-24_h100_kv_cache_served"
_FOUR_BIT_H200 = "2026-11-24_h200_four_bit_fp8_served"
_BOTH = "2026-11-23_h100_four_bit_fp8_served"
_ONE_GPU = "2026-11-23_h100_fp8_one_gpu_served"
_FP8_LINEARS = "2026-11-22_h100_fp8_linears"
_H100_FP8 = "2026-11-22_h100_fp8_served"
_FP8_ROWS = {
    "BF16": "BF16",
    "experts in FP8, vLLM's kernel": "FP8 experts, vLLM's kernel",
    "experts in FP8, our kernel on BF16 tokens": "FP8 experts, ours, BF16 tokens",
    "experts in FP8, our kernel on FP8 tokens, FP32 sums of partial sums": "FP8 experts, ours, FP8 tokens",
    "the same in wide tiles, sums in the tensor cores": "the same in wide tiles",
    "experts and linears in blocks, vLLM's": "FP8 experts and linears, vLLM",
    "the same, `quantizer: builtin`": "the same, our quantizer",
}


def _fp8_gains(record: Any) -> list[float]:
    ours, stock = ([load["tpot_ms"]["median"] for load in side["loads"]] for side in record["sides"])
    found = [theirs / mine for mine, theirs in zip(ours, stock, strict=True)]
    return [min(found), max(found)]


def _gains_over_stock_fp8(record: Any, start: int) -> list[float]:
    """Of ours over one start of stock vLLM, in time per token, then in tokens per second."""
    pairs = list(zip(record["sides"][1]["loads"], record["sides"][start]["loads"], strict=True))
    return [theirs["tpot_ms"]["median"] / mine["tpot_ms"]["median"] for mine, theirs in pairs] + [
        mine["output_tokens_per_s"] / theirs["output_tokens_per_s"] for mine, theirs in pairs
    ]


def _slower_linear(record: Any) -> list[float]:
    few = [case["us"] for case in record["cases"] if 64 <= case["tokens"] <= 512]
    return [max(us["cutlass_channel"] - us["deep_gemm_block"] for us in few)]


def _fp8(bundled: Any, wider: Any, label: str) -> list[float]:
    found = []
    for record in (bundled, wider):
        result = record["results"].get(_FP8_ROWS[label])
        if result is not None:
            base = record["results"]["BF16"]["perplexity"]
            found += [result["perplexity"], 100 * (result["perplexity"] / base - 1)][: 1 if label == "BF16" else 2]
    return found


def _loaded_gib(record: Any, side: str) -> float:
    (size,) = re.findall(r"Model loading took ([\d.]+) GiB", " ".join(record["sides"][side]["loaded"]))
    return float(size)


def sparsity(record: Any, label: str) -> list[float]:
    """Return a row of docs/passes/sparsity_24.md: perplexity, and how far it is from the dense one in percent."""
    base, found = record["results"]["all weights"], record["results"][label]
    change = [] if found is base else [100 * (found["perplexity"] / base["perplexity"] - 1)]
    return [found["perplexity"], *change, found["expert_bytes"]]


def _four_bit(record: Any, label: str) -> list[float]:
    base, found = record["results"]["bf16"], record["results"][label.lower()]
    change = [] if found is base else [100 * (found["perplexity"] / base["perplexity"] - 1)]
    errors = found["output_errors"]
    return [found["perplexity"], *change, found["expert_bytes"], *([min(errors), max(errors)] if errors else [])]


def _e4m3_tokens(record: Any, label: str) -> list[float]:
    weights, tokens = label.split(", ")
    found = record["results"]["heldout"][weights.lower() + (", E4M3 tokens" if tokens == "E4M3" else "")]
    return [found[key] for key in ("perplexity", "kl_mean", "kl_p99", "top1_agreement")]


def _fp8_cache(record: Any, clients: str) -> list[float]:
    """Time between two tokens in ms with a cache in FP8 and in 16 bits, and per output token; weights in FP8."""
    loads = [
        next(load for load in side["loads"] if load["clients"] == int(clients)) for side in record["sides"]
    ]  # fmt: skip
    return [load[metric]["median"] for metric in ("itl_ms", "tpot_ms") for load in loads]


def _fp8_cache_gain(record: Any) -> list[float]:
    fp8, wide = _fp8_cache(record, "64")[:2]
    return [wide / fp8]


def _four_bit_served(four: Any, bf16: Any, both: Any, clients: str) -> list[float]:
    """Time per output token in ms and output tokens per second: BF16, FP8, four bits alone and with FP8."""
    mxfp4, fp8 = four["sides"]
    loads = [
        next(load for load in side["loads"] if load["clients"] == int(clients))
        for side in (bf16["sides"][0], fp8, mxfp4, both["sides"][0])
    ]
    return [value for load in loads for value in (load["tpot_ms"]["median"], load["output_tokens_per_s"])]


def _four_bit_gains(four: Any, bf16: Any) -> list[float]:
    pairs = zip(four["sides"][0]["loads"], bf16["sides"][0]["loads"], strict=True)
    gains = [ours["output_tokens_per_s"] / its["output_tokens_per_s"] for ours, its in pairs]
    return [min(gains), max(gains)]


CLAIMS = [
    Table("docs/passes/fp8.md", "| | bundled", "Perplexity, served on one H200", 1, _QUALITY, _fp8),
    Claim("docs/passes/fp8.md", "compiled nothing afterwards; stock vLLM in BF16 was ready after {151} s",
          (_H100_FP8,), lambda found: found["sides"][1]["ready_s"]),
    Claim("docs/passes/fp8.md", "ready after {187} s with", (_H100_FP8,), lambda found: found["sides"][0]["ready_s"]),
    Claim("docs/passes/fp8.md", "out: {1.29}x to {1.69}x in time per token", (_H100_FP8,), _fp8_gains),
    Claim("docs/passes/fp8.md", "{1.17}x, {1.04}x, {1.09}x and {1.18}x in time per token, {1.17}x, {1.11}x, {1.14}x and"
          " {1.18}x in tokens per second", (_ONE_GPU,), lambda found: _gains_over_stock_fp8(found, 0)),
    Claim("docs/passes/fp8.md", "afterwards: {1.16}x, {1.10}x, {1.13}x and {1.13}x in tokens per second", (_ONE_GPU,),
          lambda found: _gains_over_stock_fp8(found, 2)[4:]),
    Claim("docs/passes/fp8.md", "stock vLLM ready after {180} s, ours after {171} s", (_ONE_GPU,),
          lambda found: [found["sides"][side]["ready_s"][0] for side in (0, 1)]),
    Claim("docs/passes/fp8.md", "by at most {7} us each on an H100", (_FP8_LINEARS,), _slower_linear),
    Claim("docs/passes/fp8.md", "{29.1} GiB of weights instead of {56.9}", (_SERVED,),
          lambda found: [_loaded_gib(found, "fp8"), _loaded_gib(found, "stock")]),
    Claim("docs/passes/fp8.md", "{4.31} ms per token with vLLM's FP8, {4.11} in BF16, {3.68} in FP8", (_SERVED,),
          lambda found: [found["sides"][side]["loads"]["1"]["tpot_ms_median"]
                         for side in ("fp8", "stock", "fp8+flash_dmoe")]),
    Table("docs/passes/kv_cache.md", "| clients |", "**Evidence.**", 1, (_KV_CACHE,), _fp8_cache),
    Claim("docs/passes/kv_cache.md", "a step is {1.18} times as fast", (_KV_CACHE,), _fp8_cache_gain),
    Table("docs/passes/four_bit.md", "| experts |", "**Evidence.**", 1, (_FOUR_BIT,), _four_bit),
    Table("docs/passes/four_bit.md", "| weights, tokens |", "**Evidence.**", 1, (_E4M3_TOKENS,), _e4m3_tokens),
    Claim("docs/passes/four_bit.md", "With the weights as they are the perplexity is {17.651} there.", (_E4M3_TOKENS,),
          lambda found: [found["results"]["heldout"]["bf16"]["perplexity"]]),
    Table("docs/passes/four_bit.md", "| judged weights, tokens |", "The same of a model trained", 1, (_JUDGED,),
          _e4m3_tokens),
    Claim("docs/passes/four_bit.md", "{168,630} tokens of files it never saw, perplexity {6.633} with", (_JUDGED,),
          lambda found: [found["positions"]["heldout"], found["results"]["heldout"]["bf16"]["perplexity"]]),
    Claim("docs/passes/four_bit.md", "which is not shipped: {165} million parameters (12 layers, 16 experts of width "
          "512, 4 a token), {200} s on one H100, {30}\nmillion tokens", (_JUDGED,),
          lambda found: [found["model"]["parameters"] / 1e6, found["model"]["training"]["seconds"],
                         found["model"]["training"]["tokens"] / 1e6]),
    Claim("docs/passes/four_bit.md", "a mean KL of {0.0135} and agrees on {0.909} of the next tokens, with E4M3 tokens "
          "{0.0143} and {0.906}", (_JUDGED,),
          lambda found: [found["results"]["corpus"][name][key] for name in ("mxfp4", "mxfp4, E4M3 tokens")
                         for key in ("kl_mean", "top1_agreement")]),
    Table("docs/passes/four_bit.md", "| clients |", "**Evidence.**", 1, (_FOUR_BIT_SERVED, _H100, _BOTH),
          _four_bit_served),
    Claim("docs/passes/four_bit.md",
          "was {3.22}, {7.33}, {11.47} and {22.93} ms, and {297}, {1,908}, {4,711} and {9,064} tokens per\nsecond",
          (_FOUR_BIT_H200,),
          lambda found: [load["tpot_ms"]["median"] for load in found["sides"][0]["loads"]]
          + [load["output_tokens_per_s"] for load in found["sides"][0]["loads"]]),
    Claim("docs/passes/four_bit.md", "{1.2} to {2.0} times the tokens per second", (_FOUR_BIT_SERVED, _H100),
          _four_bit_gains),
    Claim("docs/passes/four_bit.md", "The weights took {18.5} GB, and {17.6} GB", (_FOUR_BIT_SERVED, _BOTH),
          lambda *found: [each["sides"][0]["memory"]["parts"][0]["found_bytes"] / 1e9 for each in found]),
    Claim("docs/passes/four_bit.md",
          "with our kernels {361}, {4,025}, {7,620} and {10,782} tokens per second, with vLLM's Triton kernels {333}, "
          "{3,624}, {7,543} and\n{10,957}",
          ("2026-11-26_h200_gpt_oss_20b_four_experts",),
          lambda found: [load["output_tokens_per_s"] for side in found["sides"] for load in side["loads"]]),
    Claim("docs/passes/four_bit.md",
          "took {4.11}, {12.78}, {20.00} and {33.14} ms,\nand gave {232}, {1,155}, {2,860} and {6,571} tokens per "
          "second",
          ("2026-11-24_h200_stock_served",),
          lambda found: [load["tpot_ms"]["median"] for load in found["sides"][0]["loads"]]
          + [load["output_tokens_per_s"] for load in found["sides"][0]["loads"]]),
    Claim("docs/passes/four_bit.md", "a layer was {1.14} times as fast at 4096 tokens", (_E4M3,),
          lambda found: e4m3_beside_bf16(found, "Qwen3-30B-A3B", "4096")[2:]),
    Claim("docs/passes/four_bit.md", "our FP8 kernels are {1.45} times as fast", (_MXFP4,),
          lambda found: mxfp4_share(found, "fp8", 4096)[1:]),
    Table("docs/passes/sparsity_24.md", "| experts |", "**Evidence.**", 1, (_SPARSITY,), sparsity),
]  # fmt: skip
