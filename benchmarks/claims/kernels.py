"""Lists the numbers of the pages of kernels."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.claims.claim import Claim, Table, cases

_CHECKS = "2026-11-20_h200_checks"
_SKINNY, _DENSE = "2026-11-27_h100_skinny_gemm", "2026-11-27_h100_dense_products"
_PAGED_DECODE, _DECODE_STEP = "2026-11-27_h100_paged_decode", "2026-11-22_h100_decode_step"
_MXFP4 = "2026-11-23_h100_mxfp4_experts"
_E4M3 = "2026-11-26_h100_mxfp4_in_e4m3"
_SCALES, _FETCHES = "2026-11-27_h100_four_bit_bulk_scales", "2026-11-27_h100_weight_fetch_trials"
_FOUR_BITS, _LINES = "2026-11-28_h100_four_bit_experts", "2026-11-28_h100_weight_fetch_trials"
_FOUR_BITS_H200 = "2026-11-28_h200_four_bit_experts"
_TWO_BLOCKS = "2026-11-27_h100_four_bit_two_blocks"
_DECODE_CHECK = "2026-11-23_epyc_decode_check"
_DECODE_H100 = "2026-11-23_h100_decode_check"
_PEERS = {"Humming": "humming", "FlashInfer CuTe DSL": "flashinfer_cutedsl"}
_PEER_LAYERS = {"Qwen3-30B-A3B": "qwen3-30b-a3b", "half of Mixtral 8x7B": "mixtral-8x7b-tp2"}


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


_LINEARS = {
    "QKV of Qwen3-30B-A3B": "qwen3-qkv",
    "QKV, a quarter (tensor parallelism)": "qwen3-qkv-tp4",
    "output projection, a quarter": "qwen3-o-tp4",
    "QKV of Mixtral 8x7B": "mixtral-qkv",
    "QKV of gpt-oss-120b": "gpt-oss-qkv",
}


def _beside_the_rest(case: Any) -> list[float]:
    medians = {name: statistics.median(samples) for name, samples in case["samples_us"].items()}
    return [medians[side] - medians["norm"] for side in medians if side != "norm"]


class _Linears:
    """Rows of a table in which "its output projection" belongs to the row above."""

    def __init__(self) -> None:
        self._above = ""

    def row(self, record: Any, weight: str) -> list[float]:
        name = _LINEARS.get(weight) or self._above.replace("-qkv", "-o")
        if name.endswith("-qkv"):
            self._above = name
        found = {
            case["tokens"]: _beside_the_rest(case)
            for case in record["cases"]
            if (case["what"], case["name"], case["weights"]) == ("alone", name, "bf16")
        }
        return [*found[1], *found[8]]


def _both_linears(record: Any, tokens: str) -> list[float]:
    (case,) = _products(record, "layer", "qwen3", "bf16", int(tokens))
    return _beside_the_rest(case)


def _products(record: Any, what: str, name: str, weights: str, tokens: int) -> list[Any]:
    wanted = (what, name, weights, tokens)
    return [case for case in record["cases"] if (case["what"], case["name"], case["weights"], case["tokens"]) == wanted]


def _fp8_projections(channels: Any, blocks: Any, model: str, scales: str, tokens: str) -> list[float]:
    record, weights = (channels, "channel") if scales == "per channel" else (blocks, "block")
    (case,) = _products(record, "chain", model.partition("-")[0].partition(" ")[0].lower(), weights, int(tokens))
    return _beside_the_rest(case)


def _asking_l2(record: Any) -> list[float]:
    (case,) = [each for each in record["cases"] if (each["what"], each["tokens"]) == ("layer", 1)]
    samples = case["samples_us"]
    return [statistics.median(samples["skinny-w8s2 o/128"]) - statistics.median(samples["skinny-w8s2"])]


def _attention_us(record: Any, shape: str) -> dict[tuple[int, int], tuple[float, float]]:
    """Return ours and FlashAttention's time, each with the store of new keys, by tokens and keys."""
    found = {}
    for case in record["cases"]:
        if (case["what"], case["name"]) == ("layer", shape):
            medians = {name: statistics.median(samples) for name, samples in case["samples_us"].items()}
            times = (medians["ours"] - medians["rest"], medians["theirs"] - medians["rest"])
            found[case["tokens"], case["length"]] = times
    return found


def _attention_of_qwen3(record: Any) -> list[float]:
    times = _attention_us(record, "qwen3-30b")
    return [each for keys in (128, 640, 2048, 4096) for each in times[1, keys]]


def _attention_of_mixtral(record: Any) -> list[float]:
    times = _attention_us(record, "mixtral")
    ratios = [theirs / ours for (_, keys), (ours, theirs) in times.items() if keys <= 4096]
    return [min(ratios), max(ratios)]


def _attention_of_a_step(record: Any, step: Any) -> list[float]:
    ours, theirs = _attention_us(record, "qwen3-30b")[1, 128]
    saved, step_us = 48 * (theirs - ours), step["sides"]["stock"]["ledgers"][0]["step_us"]
    return [saved, 100 * saved / step_us, step_us]


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


def _mxfp4_beside_marlin(record: Any, tokens: str) -> list[float]:
    (case,) = (each for each in cases(record, dtype="mxfp4") if each["tokens"] == int(tokens))
    times = {name: side["median_us"] for name, side in case["sides"].items()}
    marlin = times.pop("vllm")
    ours = min(us for name, us in times.items() if not name.startswith("grouped-mxfp4-"))  # those round the tokens
    return [marlin, ours, marlin / ours, 100 * case["floor_us"] / ours]


def _mxfp4_on_both(h100: Any, h200: Any) -> list[float]:
    """Return how many times as fast ours are on an H200: the least and the most of the numbers of tokens shown."""
    shown = ("1", "4", "8", "16", "64", "256", "1024", "4096")
    gains = [_mxfp4_beside_marlin(h100, each)[1] / _mxfp4_beside_marlin(h200, each)[1] for each in shown]
    return [min(gains), max(gains)]


def _fetches(record: Any, weights: str) -> list[float]:
    """Return the times of tiles of 16 tokens: a layer of Qwen3's at 64 and 16 tokens, then one of gpt-oss."""
    return [
        case["sides"]["grouped-mxfp4_weights-n16"]["median_us"]
        for shape in ("qwen3-30b-a3b", "gpt-oss-120b")
        for tokens in (64, 16)
        for case in record["runs"][weights]["cases"]
        if (case["shape"]["name"], case["tokens"]) == (shape, tokens)
    ]


def _fetched(record: Any, run: str, dtype: str, shape: str, tokens: int) -> float:
    """Return the time of tiles of 16 tokens in one run of a record of how weights are fetched."""
    (case,) = [
        each
        for each in record["runs"][run]["cases"]
        if (each["dtype"], each["shape"]["name"], each["tokens"]) == (dtype, shape, tokens)
    ]
    (name,) = [side for side in case["sides"] if side in ("grouped-bf16-n16", "grouped-mxfp4_weights-n16")]
    return case["sides"][name]["median_us"]


def _fetched_alone(record: Any) -> list[float]:
    alone, before = _fetches(record, "none"), _fetches(record, "256 bytes")
    (floor,) = [
        case["floor_us"]
        for case in record["runs"]["none"]["cases"]
        if (case["shape"]["name"], case["tokens"]) == ("qwen3-30b-a3b", 64)
    ]
    others = zip(alone[1:], before[1:], strict=True)
    return [alone[0], before[0], 100 * floor / alone[0], *(us for each in others for us in each)]


def mxfp4_share(record: Any, others: str, most_tokens: int) -> list[float]:
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


_E4M3_LAYERS = {"Qwen3-30B-A3B": "qwen3-30b-a3b", "gpt-oss-120b": "gpt-oss-120b"}


def _e4m3_times(record: Any, layer: str, tokens: str) -> dict[str, float]:
    """Medians in us of every side of a layer of MXFP4 weights."""
    name = _E4M3_LAYERS[layer]
    for case in record["printed"]["cases"]:
        if (case["shape"], case["tokens"]) == (name, int(tokens)):
            return case["median_us"]
    (case,) = [
        each for each in cases(record, dtype="mxfp4") if (each["shape"]["name"], each["tokens"]) == (name, int(tokens))
    ]
    return {side: times["median_us"] for side, times in case["sides"].items()}


def e4m3_beside_bf16(record: Any, layer: str, tokens: str) -> list[float]:
    """Times in us of MXFP4 weights in BF16 and in E4M3 products, the fastest tile of either, and their ratio."""
    times = _e4m3_times(record, layer, tokens)
    kept, rounded = (
        min(us for side, us in times.items() if side.startswith(names))
        for names in ("grouped-mxfp4_weights-", "grouped-mxfp4-n")
    )
    return [kept, rounded, kept / rounded]


def _e4m3_beside_marlin(record: Any) -> list[float]:
    found = [(_e4m3_times(record, "Qwen3-30B-A3B", each)["marlin"], each) for each in ("1024", "2048", "4096")]
    return [us for us, _ in found] + [us / e4m3_beside_bf16(record, "Qwen3-30B-A3B", each)[1] for us, each in found]


def _int4_of_16(record: Any) -> list[float]:
    (case,) = [each for each in cases(record, dtype="int4_g128") if each["tokens"] == 64]
    return [case["sides"]["grouped-int4_weights-n16"]["median_us"]]


def _int4_beside_marlin(record: Any, tokens: str, *, dtypes: Sequence[str] = ("int4_g128z", "int4_g32")) -> list[float]:
    """Time in us of Marlin's kernels and of ours, and their ratio, for each kind of groups."""
    row = []
    for dtype in dtypes:
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
    Table("docs/passes/skinny_gemm.md", "| weight | cuBLAS, 1 token |", "**Evidence.**", 1, (_DENSE,), _Linears().row),
    Table("docs/passes/skinny_gemm.md", "| tokens | cuBLAS |", "in a whole layer", 1, (_DENSE,), _both_linears),
    Table("docs/passes/skinny_gemm.md", "| projections | scales |", "Both projections one after the other", 3,
          (_DENSE, f"{_DENSE}_blocks"), _fp8_projections),
    Claim("docs/kernels.md", "a layer of one token took {0.6} us longer", (_SKINNY,), _asking_l2),
    Table("docs/passes/flash_dmoe.md", "| tokens | product and top-k, vLLM |", "On one H100, after an", 1,
          ("2026-11-26_h100_gate_topk",), _gate),
    Table("docs/kernels.md", "| layer | weights | library |", "how many times as fast ours is", 4,
          ("2026-11-25_h100_peers",), _peer),
    Table("docs/passes/flash_dmoe.md", "| largest difference", "`--no-decode-check` leaves", 1, (_DECODE_CHECK,),
          _decoded),
    Claim("docs/passes/flash_dmoe.md", "no alarm in {36} checks of {12} servers", (_DECODE_H100,), _clean_checks),
    Claim("docs/passes/flash_dmoe.md", "was {0.49} in BF16 and {0.93} where", (_DECODE_H100,), _decoded_on_gpu),
    Claim("docs/kernels.md",
          "took {9.3} us where vLLM's launch for the keys and FlashAttention took {11.4} at 128 keys, {11.6} for "
          "{12.7} at 640,\nbut {17.0} for {14.1} at 2,048 and {26.0} for {15.7} at 4,096", (_PAGED_DECODE,),
          _attention_of_qwen3),
    Claim("docs/kernels.md", "it was {1.06} to {1.46} times as fast up to 4,096 keys", (_PAGED_DECODE,),
          _attention_of_mixtral),
    Claim("docs/kernels.md",
          "would save {101} us of a step, {2.1} % of the {4,837} us of stock vLLM", (_PAGED_DECODE, _DECODE_STEP),
          _attention_of_a_step),
    Table("docs/kernels.md", "| tokens | Marlin, MXFP4 |", "**MXFP4.**", 1, (_FOUR_BITS,), _mxfp4_beside_marlin),
    Table("docs/kernels.md", "| tokens, H200 | Marlin, MXFP4 |", "**MXFP4.**", 1, (_FOUR_BITS_H200,),
          _mxfp4_beside_marlin),
    Claim("docs/kernels.md", "{1.04} to {1.07} times as fast, so their floor", (_FOUR_BITS, _FOUR_BITS_H200),
          _mxfp4_on_both),
    Claim("docs/kernels.md", "had {520.4} us for its {608.0} at 64 tokens", ("2026-11-28_h200_four_bit_gpt_oss",),
          lambda found: _mxfp4_beside_marlin(found, "64")[1::-1]),
    Claim("docs/kernels.md", "ours took {577.5} us for its {616.2} at 64 tokens", ("2026-11-28_h100_four_bit_gpt_oss",),
          lambda found: _mxfp4_beside_marlin(found, "64")[1::-1]),
    Claim("docs/kernels.md", "{131.4} us where {138.3} were taken with the lines at 64 tokens, {81} % of the floor, "
          "and {92.2} for {96.8}\nat 16; on gpt-oss-120b's layer {624.0} for {709.5} and {299.3} for {334.6}",
          (_FETCHES,), _fetched_alone),
    Claim("docs/kernels.md", "gpt-oss's took {535.2} and {263.9} us and Qwen3's {129.8} and {91.7}", (_FETCHES,),
          lambda found: [*_fetches(found, "256 bytes, stages contiguous")[2:],
                         *_fetches(found, "256 bytes, stages contiguous")[:2]]),
    Claim("docs/kernels.md", "took {410.4} us for {391.3} at 64 tokens", (_LINES,),
          lambda found: [_fetched(found, run, "bf16", "qwen3-30b-a3b", 64) for run in ("none", "256 bytes")]),
    Claim("docs/kernels.md", "took {577.8} us for {621.2} at 64 tokens, {279.5} for {297.8} at 16 and {685.7} for "
          "{739.0} at 256", (_LINES,),
          lambda found: [_fetched(found, f"four bits, rows {run}", "mxfp4", "gpt-oss-120b", tokens)
                         for tokens in (64, 16, 256) for run in ("at multiples of 128 bytes", "as they are")]),
    Table("docs/kernels.md", "| tokens |", "**INT4.**", 1, (_FOUR_BITS,), _int4_beside_marlin),
    Table("docs/kernels.md", "| tokens, one H200 |", "**INT4.**", 1, (_FOUR_BITS_H200,), _int4_beside_marlin),
    Table("docs/kernels.md", "| tokens, H200 |", "**INT4.**", 1, ("2026-11-28_h200_four_bit_int4_g128",),
          lambda record, tokens: _int4_beside_marlin(record, tokens, dtypes=("int4_g128",))),
    Claim("docs/kernels.md", "took {179.5} us at 64 tokens in groups of 128", (_TWO_BLOCKS,), _int4_of_16),
    Claim("docs/kernels.md", "with scales beside the\nring {140.5}", (_SCALES,), _int4_of_16),
    Table("docs/kernels.md", "| layer | tokens | products", "**MXFP4.**", 2, (_E4M3,), e4m3_beside_bf16),
    Claim("docs/kernels.md", "errors up to {4.57} %", (_E4M3,),
          lambda found: [100 * max(each["error"] for each in found["errors"])]),
    Claim("docs/kernels.md", "Marlin took {536.4}, {881.6} and {1613.5} us for Qwen3-30B-A3B's layer at 1024, 2048 and "
          "4096 tokens: {2.46}, {2.58} and {2.85} times as long", (_E4M3,), _e4m3_beside_marlin),
    Claim("docs/kernels.md", "Our FP8 kernels took {1370.0} us", (_E4M3,),
          lambda found: [min(side["median_us"] for each in cases(found, dtype="fp8") if each["tokens"] == 4096
                             for side in each["sides"].values())]),
    Claim("docs/kernels.md", "{0.69} to {0.93} of our FP8 kernels'", (_MXFP4,),
          lambda found: mxfp4_share(found, "fp8", 1024)),
    Claim("docs/kernels.md", "up to 1024 tokens and {1.45} at 4096", (_MXFP4,),
          lambda found: mxfp4_share(found, "fp8", 4096)[1:]),
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
