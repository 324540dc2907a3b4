"""Lists the numbers of the pages of passes and kernels."""

from __future__ import annotations

import itertools
import re
import statistics
from typing import Any

from benchmarks.claims.claim import Claim, Table, cases
from moe_optimizer.passes.speculation.step_costs import DRAFTED_TOKEN_US, DRAFTING_STEP_US

_LAYOUTS = "2026-11-21_h200_layouts"
_SERVED = "2026-11-21_h200_served"
_QUALITY = ("2026-11-20_h200_fp8_quality", "2026-11-21_h200_fp8_quality_wide")
_CHECKS = "2026-11-20_h200_checks"
_DISAGGREGATION = "2026-11-20_epyc_disaggregation"
_LOAD_CPU, _LOAD_GPU = "2026-11-20_epyc_expert_load", "2026-11-20_h200_expert_load"
_PLACEMENT = "2026-11-21_epyc_placement"
_SPARSITY = "2026-11-20_epyc_sparsity_24"
_FOUR_BIT = "2026-11-24_epyc_four_bit"
_FOUR_BIT_SERVED, _MXFP4 = "2026-11-23_h100_four_bit_served", "2026-11-23_h100_mxfp4_experts"
_H100 = "2026-11-22_h100_served"
_KV_CACHE, _INT4 = "2026-11-24_h100_kv_cache_served", "2026-11-24_h100_int4_experts"
_FOUR_BIT_H200 = "2026-11-24_h200_four_bit_fp8_served"
_ONE_GPU, _BOTH = "2026-11-23_h100_fp8_one_gpu_served", "2026-11-23_h100_four_bit_fp8_served"
_H100_FP8, _FP8_LINEARS = "2026-11-22_h100_fp8_served", "2026-11-22_h100_fp8_linears"
_SPECULATION, _VERIFY_STEPS = "2026-11-23_epyc_speculation", "2026-11-25_h100_verify_steps"
_DECODE_CHECK, _DECODE_H100 = "2026-11-23_epyc_decode_check", "2026-11-23_h100_decode_check"
_TUNED = "2026-11-20_h200_tuned_configs"
_CLIENTS = ("1", "16", "128")
_PEERS = {"Humming": "humming", "FlashInfer CuTe DSL": "flashinfer_cutedsl"}
_PEER_LAYERS = {"Qwen3-30B-A3B": "qwen3-30b-a3b", "half of Mixtral 8x7B": "mixtral-8x7b-tp2"}
_FP8_ROWS = {
    "BF16": "BF16",
    "experts in FP8, vLLM's kernel": "FP8 experts, vLLM's kernel",
    "experts in FP8, our kernel on BF16 tokens": "FP8 experts, ours, BF16 tokens",
    "experts in FP8, our kernel on FP8 tokens, FP32 sums of partial sums": "FP8 experts, ours, FP8 tokens",
    "the same in wide tiles, sums in the tensor cores": "the same in wide tiles",
    "experts and linears in blocks, vLLM's": "FP8 experts and linears, vLLM",
    "the same, `quantizer: builtin`": "the same, our quantizer",
}


def _disaggregation(record: Any, label: str) -> list[float]:
    sides = [record["results"][side] for side in ("one server", "prefill and decode")]
    if label.startswith("first token"):
        return [side["first_token_of_long_prompts_ms"]["p50"] for side in sides]
    traffic = "quiet" if label.endswith("without long prompts, median") else "long prompts"
    key = {"99th percentile": "p99", "longest": "max"}.get(label, "p50")
    return [side["between_tokens_ms"][traffic][key] for side in sides]


def _added_work(record: Any, key: str) -> list[float]:
    shares = [100 * size["added_work"][key] for size in record["results"].values()]
    return [min(shares), max(shares)]


def _speculation(record: Any) -> list[float]:
    found, drafts = record["results"], record["drafts"]
    accepted = 100 * drafts["accepted_tokens"] / drafts["draft_tokens"]
    return [*found["median_ms"].values(), found["ratio"], *found["ratio_interval_95"], accepted, found["equal_answers"]]


def _speculation_kept(record: Any) -> list[float]:
    (found,) = [each for each in record["entries"] if (each["step"], each["what"]) == ("ablation", "speculation")]
    return [found["ratio"], found["low"], found["high"]]


def _peer(record: Any, layer: str, weights: str, library: str, tokens: str) -> list[float]:
    wanted = (_PEERS[library], _PEER_LAYERS[layer], weights.lower(), int(tokens))
    (sides,) = [
        each["sides"]
        for each in record["cases"]
        if (each["peer"], each["shape"]["name"], each["dtype"], each["tokens"]) == wanted
    ]
    peer = min(each["median_us"] for name, each in sides.items() if name.startswith(_PEERS[library]))
    ours = min(each["median_us"] for name, each in sides.items() if name.startswith(("direct", "grouped")))
    return [peer, ours, peer / ours]


def _gate_layer(record: Any, shape: str, tokens: int) -> list[float]:
    (samples,) = (
        case["samples_us"]
        for case in record["cases"]
        if (case["shape"]["name"], case["what"], case["tokens"]) == (shape, "layer", tokens)
    )
    sides = ("norm, F.linear, topk_softmax, ours", "norm, gate_topk, ours")
    return [statistics.median(samples[side]) for side in sides]


def _gate(record: Any, tokens: str) -> list[float]:
    gate, layer = (
        {name: statistics.median(samples) for name, samples in case["samples_us"].items()}
        for what in ("gate", "layer")
        for case in record["cases"]
        if (case["what"], case["tokens"]) == (what, int(tokens))
    )
    ours, theirs = "norm, gate_topk of 1 settled", "norm, F.linear, topk_softmax"
    return [
        gate[theirs] - gate["norm"],
        gate[ours] - gate["norm"],
        layer[f"{theirs}, ours"],
        layer[f"{ours}, ours"],
    ]


def _verify_steps(record: Any, experts: str, drafts: str) -> list[float]:
    loads = record["runs"]["bf16" if experts.startswith("BF16") else "four_bit_fp8"]["sides"][drafts]["loads"]
    return [value for load in loads.values() for value in (load["step_ms"], load["tpot_ms_median"])]


def _faster_by_drafts(record: Any) -> list[float]:
    found = []
    for run in ("bf16", "four_bit_fp8"):
        plain, drafting = (record["runs"][run]["sides"][drafts]["loads"] for drafts in ("0", "3"))
        gains = [plain[clients]["tpot_ms_median"] / drafting[clients]["tpot_ms_median"] for clients in plain]
        found += [min(gains), max(gains)]
    return found


def _longer_step(record: Any, requests: str) -> list[float]:
    found = record["results"][requests]["quantiles"]["50%"]
    low, high = found["ratio_interval_95"]
    return [found["off_ms"], *(100 * (each - 1) for each in (found["ratio"], low, high))]


def _added_us(record: Any) -> list[float]:
    added = [1000 * (of["quantiles"]["50%"]["on_ms"] - of["quantiles"]["50%"]["off_ms"])
             for of in record["results"].values()]  # fmt: skip
    return [min(added), max(added)]


def _deep_gemm_over_ours(found: Any) -> dict[tuple[str, int], float]:
    """Return the time of DeepGEMM over that of the best of our kernels, by layer and tokens, both routings together."""
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for case in cases(found, dtype="fp8"):
        sides = {name: side["median_us"] for name, side in case["sides"].items()}
        ours = [each for name, each in sides.items() if not name.startswith(("vllm", "deep_gemm"))]
        if "deep_gemm" in sides and ours and case["tokens"] >= 64:
            times.setdefault((case["shape"]["name"], case["tokens"]), []).append((sides["deep_gemm"], min(ours)))
    return {key: sum(a for a, _ in pairs) / sum(b for _, b in pairs) for key, pairs in times.items()}


def _ahead_on_half_of_mixtral(found: Any) -> list[float]:
    ratios = _deep_gemm_over_ours(found)
    return [min(ratios.values()), *(1 / ratios["mixtral-8x7b-tp2", tokens] for tokens in (4096, 8192))]


def _behind_on_half_of_mixtral(found: Any) -> list[float]:
    ratios = [_deep_gemm_over_ours(found)["mixtral-8x7b-tp2", tokens] for tokens in (64, 128, 256, 512)]
    return [min(ratios), max(ratios)]


class _Sizes:
    """The size of a row stands in its first cell, or in that of the row above."""

    def __init__(self) -> None:
        self.last = ""

    def row(self, record: Any, size: str, load: str) -> list[float]:
        """Return times, ratios and fullest ranks of one row."""
        self.last = size or self.last
        key = self.last.replace(" on ", ", ")
        key = "256 x 61, 64 ranks, 320 replicas, 8 nodes, 8 groups" if key.startswith("the same") else key
        (case,) = [each for each in record["results"]["cases"] if (each["size"], each["load"]) == (key, load.lower())]
        anew, moved = case["anew"], case["moved"]
        return [
            anew["ours_ms"]["median"], 1, anew["ratio"], moved["ours_ms"]["median"], 1, moved["ratio"],
            anew["ours_imbalance"], anew["theirs_imbalance"],
        ]  # fmt: skip


def _placement_growth(record: Any, when: str) -> list[float]:
    return [case[when]["ns_per_layer_e_log_e"] for case in record["results"]["growth"]]


def _layouts(record: Any, layout: str) -> list[float]:
    def of(side: str, clients: str) -> tuple[float, float]:
        load = record["sides"][side]["loads"][clients]
        return load["tpot_ms_median"], load["output_tokens_per_s"]

    if layout.startswith("EP against"):
        other = "slices" if "slices" in layout else "replicas"
        found = [100 * (of("experts", each)[0] / of(other, each)[0] - 1) for each in _CLIENTS]
        return found if other == "replicas" else [*found, 100 * (of("experts", "128")[1] / of(other, "128")[1] - 1)]
    side = {"slices": "slices", "whole": "experts", "replicas": "replicas"}[layout.split(maxsplit=1)[0]]
    return [*itertools.chain(*(of(side, clients) for clients in _CLIENTS))]


def _spread(record: Any) -> list[float]:
    found = [record["sides"][side]["loads"]["128"]["tpot_ms"] for side in ("slices", "experts")]
    return [bound for times in found for bound in (min(times), max(times))]


def _replicas(record: Any, label: str) -> list[float]:
    slices, replicas = (record["sides"][side]["loads"] for side in ("slices", "replicas"))
    if label.startswith("longer"):
        return [100 * (replicas[each]["tpot_ms_median"] / slices[each]["tpot_ms_median"] - 1) for each in _CLIENTS]
    return [
        100 * (1 - replicas[each]["output_tokens_per_s"] / slices[each]["output_tokens_per_s"]) for each in _CLIENTS
    ]


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


def _mxfp4_share(record: Any, others: str, most_tokens: int) -> list[float]:
    """Least and most of the time that the fastest of our MXFP4 kernels takes of another side's at the same tokens."""

    def best(case: Any, names: tuple[str, ...]) -> float:
        return min(side["median_us"] for name, side in case["sides"].items() if name.startswith(names))

    ours = {case["tokens"]: best(case, ("direct", "grouped")) for case in cases(record, dtype="mxfp4")}
    if others == "marlin":
        other = {case["tokens"]: best(case, ("vllm",)) for case in cases(record, dtype="mxfp4")}
    else:
        other = {case["tokens"]: best(case, ("direct", "grouped")) for case in cases(record, dtype=others)}
    shares = [ours[tokens] / other[tokens] for tokens in ours if tokens <= most_tokens]
    return [min(shares), max(shares)]


def _int4_beside_marlin(record: Any, tokens: str) -> list[float]:
    """Time in us of Marlin's kernels and of the fastest of ours, and how many times as fast: groups of 128 and 32."""
    row = []
    for dtype in ("int4_g128", "int4_g32"):
        (case,) = [each for each in cases(record, dtype=dtype) if each["tokens"] == int(tokens.replace(",", ""))]
        ours = min(side["median_us"] for name, side in case["sides"].items() if name != "vllm")
        marlin = case["sides"]["vllm"]["median_us"]
        row += [marlin, ours, marlin / ours]
    return row


def largest_error(record: Any, *kernels: str) -> float:
    """Return the largest error in per cent of the norm, of kernels whose names begin so."""
    (found,) = [run["error_by_tokens"] for run in record["runs"] if "error_by_tokens" in run]
    return 100 * max(error for of in found.values() for name, error in of.items() if name.startswith(kernels))


def _error_of_tiles(record: Any) -> list[float]:
    (found,) = [run["error_by_variant"] for run in record["runs"] if "error_by_variant" in run]
    errors = {error for name, error in found.items() if name.startswith("grouped-fp8")}
    return [100 * error for error in errors]


def _kept(record: Any) -> list[float]:
    gains = {size["tokens"]: size["ratio"] for size in record["sizes"]}
    return [gains[64], gains[4096]]


def _same_row(record: Any) -> list[float]:
    return [max(100 * abs(size["ratio"] - 1) for size in record["sizes"] if size["same_row"])]


def _decoded(found: Any, label: str) -> list[float]:
    """Return the largest difference in the bundled and in the deeper model."""
    mistake = {"right": "", "noise": "noise", "a": "decode: scale"}[label.split(maxsplit=1)[0]]
    return [
        max(each["largest"] for each in found["samples"]
            if (each["model"], each["format"], each["mistake"]) == (model, "bfloat16", mistake))
        for model in ("tiny-moe", "deep")
    ]  # fmt: skip


def _clean_checks(found: Any) -> list[float]:
    """Return how many checks found nothing, and of how many servers."""
    clean = [each for each in found["samples"] if not (each["mistake"] or each["wrong"] or each["off"])]
    return [len(clean), len({(each["model"], each["format"]) for each in clean})]


def _decoded_on_gpu(found: Any) -> list[float]:
    plain = [each["largest"] for each in found["samples"] if each["format"] == "bfloat16"]
    return [max(plain), max(each["largest"] for each in found["samples"] if each["format"] != "bfloat16")]


CLAIMS = [
    Table("docs/passes/disaggregation.md", "| | one server", "Measured on two cores", 1, (_DISAGGREGATION,),
          _disaggregation),
    Claim("docs/passes/disaggregation.md", "after a pause of up to {642} ms", (_DISAGGREGATION,),
          lambda found: [found["results"]["prefill and decode"]["between_tokens_ms"]["long prompts"]["max"]]),
    Claim("docs/passes/speculation.md",
          "{3.66} ms without, {2.59} ms with drafts, {1.41}x ({1.22}x to {1.54}x), {80} % of the drafts accepted, "
          "{40} of", (_SPECULATION,), _speculation),
    Table("docs/passes/flash_dmoe.md", "| tokens | product and top-k, vLLM |", "On one H100, after an", 1,
          ("2026-11-26_h100_gate_topk",), _gate),
    Table("docs/kernels.md", "| layer | weights | library |", "how many times as fast ours is", 4,
          ("2026-11-25_h100_peers",), _peer),
    Table("docs/passes/speculation.md", "| experts | drafts |", "Times of a step", 2, (_VERIFY_STEPS,), _verify_steps),
    Claim("docs/passes/speculation.md",
          "made tokens {1.11} to {1.50} times as fast in BF16, and {1.07} to {1.26} times in four bits",
          (_VERIFY_STEPS,), _faster_by_drafts),
    Claim("docs/passes/speculation.md", "about {2.5} ms more than a plain one and {44} us for each draft", (),
          lambda: [DRAFTING_STEP_US / 1000, DRAFTED_TOKEN_US]),
    Claim("docs/passes/speculation.md", "kept it: {1.61}x ({1.39}x to {1.86}x) in tokens per second",
          ("2026-11-23_epyc_tuned_tiny-moe_text",), _speculation_kept),
    Claim("docs/passes/expert_load.md", "| layers of Qwen3-30B-A3B's shape | {0.10} to {0.17} %", (_LOAD_CPU,),
          lambda found: _added_work(found, "share_compiled")),
    Claim("docs/passes/expert_load.md", "| the same | {0.16} to {0.30} %", (_LOAD_CPU,),
          lambda found: _added_work(found, "share_plain")),
    Claim("docs/passes/expert_load.md",
          "1 request ({3.56} ms) | 48 layers of that shape, made-up weights | {0.6} % ({0.4} to {0.9} %)", (_LOAD_GPU,),
          lambda found: _longer_step(found, "1")),
    Claim("docs/passes/expert_load.md", "8 requests ({5.79} ms) | the same | {0.2} % ({0.1} to {0.3} %)", (_LOAD_GPU,),
          lambda found: _longer_step(found, "8")),
    Claim("docs/passes/expert_load.md", "that is {12} to {21} us a step", (_LOAD_GPU,), _added_us),
    Table("docs/passes/expert_placement.md", "| | load |", "The table compares CPU time", 2, (_PLACEMENT,),
          _Sizes().row),
    Table("docs/passes/expert_placement.md", "| E |", "Time for each unit", 1, (_PLACEMENT,), _placement_growth),
    Table("docs/passes/flash_dmoe.md", "| largest difference", "`--no-decode-check` leaves", 1, (_DECODE_CHECK,),
          _decoded),
    Claim("docs/passes/flash_dmoe.md", "no alarm in {36} checks of {12} servers", (_DECODE_H100,), _clean_checks),
    Claim("docs/passes/flash_dmoe.md", "was {0.49} in BF16 and {0.93} where", (_DECODE_H100,), _decoded_on_gpu),
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
    Table("docs/passes/parallelism.md", "| layout |", "**Measured layouts.**", 1, (_LAYOUTS,), _layouts),
    Claim("docs/passes/parallelism.md", "took {11.9} to {23.0} ms per token in slices, {12.3} to {16.5} with EP",
          (_LAYOUTS,), _spread),
    Table("docs/passes/kv_cache.md", "| clients |", "**Evidence.**", 1, (_KV_CACHE,), _fp8_cache),
    Claim("docs/passes/kv_cache.md", "a step is {1.18} times as fast", (_KV_CACHE,), _fp8_cache_gain),
    Table("docs/passes/replicas.md", "| | 1 client", "compared with slices", 1, (_LAYOUTS,), _replicas),
    Table("docs/passes/four_bit.md", "| experts |", "**Evidence.**", 1, (_FOUR_BIT,), _four_bit),
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
    Claim("docs/passes/four_bit.md", "our FP8 kernels are {1.45} times as fast", (_MXFP4,),
          lambda found: _mxfp4_share(found, "fp8", 4096)[1:]),
    Claim("docs/kernels.md", "{0.41} to {0.94} of the time of vLLM's Marlin", (_MXFP4,),
          lambda found: _mxfp4_share(found, "marlin", 4096)),
    Table("docs/kernels.md", "| tokens |", "**INT4.**", 1, (_INT4,), _int4_beside_marlin),
    Claim("docs/kernels.md", "{0.69} to {0.93} of our FP8 kernels'", (_MXFP4,),
          lambda found: _mxfp4_share(found, "fp8", 1024)),
    Claim("docs/kernels.md", "up to 1024 and {1.45} at 4096", (_MXFP4,),
          lambda found: _mxfp4_share(found, "fp8", 4096)[1:]),
    Table("docs/passes/sparsity_24.md", "| experts |", "**Evidence.**", 1, (_SPARSITY,), sparsity),
    Claim("docs/passes/tuned_configs.md", "{1.035}x (64 tokens) and {1.044}x (4096 tokens)", (_TUNED,), _kept),
    Claim("docs/passes/tuned_configs.md", "differ by at most {0.6} %", (_TUNED,), _same_row),
    Claim("docs/passes/flash_dmoe.md", "{35.8} us became {30.2} at 1 token and {135.8} became {132.8} at 8",
          ("2026-11-26_h200_gate_topk",), lambda found: [*_gate_layer(found, "qwen3-30b-a3b", 1),
                                                         *_gate_layer(found, "qwen3-30b-a3b", 8)]),
    Claim("docs/passes/flash_dmoe.md", "{39.0} became {32.5}", ("2026-11-26_h200_gate_topk",),
          lambda found: _gate_layer(found, "qwen3-235b-a22b-tp4", 1)),
    Claim("docs/kernels.md", "T = 16, 64, 512 | {4.7} %", (_CHECKS,),
          lambda found: [largest_error(found, "vllm")]),
    Claim("docs/kernels.md", "| `FP8`, same inputs | {4.4} %", (_CHECKS,),
          lambda found: [largest_error(found, "grouped-fp8-")]),
    Claim("docs/kernels.md", "`FP8_WEIGHTS`, same inputs | {0.3} %", (_CHECKS,),
          lambda found: [largest_error(found, "direct", "grouped-fp8_weights")]),
    Claim("docs/kernels.md", "T = 700 | {4.41} %", (_CHECKS,), _error_of_tiles),
    Claim("docs/kernels.md", "| H200 | 3 | {1.02} | nowhere |", ("2026-11-21_h200_fused_experts",),
          lambda found: [min(_deep_gemm_over_ours(found).values())]),
    Claim("docs/kernels.md", "| H100 | 10 | {0.86} | a half of Mixtral 8x7B (H = 4096, I = 7168, 8 experts): {1.06}x "
          "at 4096 tokens, {1.17}x at 8192 |", ("2026-11-22_h100_fused_experts",), _ahead_on_half_of_mixtral),
    Claim("docs/kernels.md", "It is {1.26} to {1.39} times slower on that layer from 64 to 512 tokens",
          ("2026-11-22_h100_fused_experts",), _behind_on_half_of_mixtral),
]  # fmt: skip
