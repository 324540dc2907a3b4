"""Lists the numbers of docs/kernel_speeds.md, which are nearly all in tables, and of decisions that rest on them."""

from __future__ import annotations

from statistics import geometric_mean
from typing import Any

from benchmarks.claims.claim import Claim, Table, cases
from moe_optimizer.specs.kernel_speeds import STOCK, TokenSpeeds, token_ranges

_PAGE = "docs/kernel_speeds.md"
_CPU_BF16, _CPU_AVX512 = "2026-11-21_epyc-avx512_bf16_fused_experts", "2026-11-21_epyc-avx512_fused_experts"
_CPU_FOUR_BIT_AVX512 = "2026-11-27_epyc-avx512_bf16_four_bit_experts"
_CPU_FOUR_BIT_AVX2 = "2026-11-28_epyc-avx2_four_bit_experts"
_FORMS = "2026-11-27_h100_four_bit_forms"
_TWO_BLOCKS = "2026-11-27_h100_four_bit_two_blocks"
_H200, _H100, _STEP = "2026-11-21_h200_fused_experts", "2026-11-22_h100_fused_experts", "2026-11-22_h100_decode_step"
_STEP_H200 = "2026-11-28_h200_decode_step"
_MORE_LAYERS = ("2026-11-28_h200_fused_experts_1", "2026-11-28_h200_fused_experts_2")
_VLLM = "vllm"
_KEEPING_BF16 = ("direct", "grouped-fp8_weights")
"""Beginnings of the names of kernels that read FP8 weights and keep the tokens in BF16."""


def vllm_us(case: Any) -> float:
    """Return the median time of vLLM's kernel."""
    return case["sides"][_VLLM]["median_us"]


def ours_us(case: Any) -> float:
    """Return the median time of our fastest variant."""
    return _median(case, _ours(case))


def cpu_ratio(case: Any, side: str) -> float:
    """Return how many times as fast as vLLM's kernel a CPU kernel of ours is."""
    return case["ratio_to_stock_bf16"][side]["median"]


def _ours(case: Any) -> str:
    return min((name for name in case["sides"] if name.startswith(("direct", "grouped-"))),
               key=lambda name: _median(case, name))  # fmt: skip


def _median(case: Any, name: str) -> float:
    return case["sides"][name]["median_us"]


def _one(record: Any, **wanted: object) -> Any:
    (case,) = cases(record, **wanted)
    return case


def _cpu(shape: str) -> Any:
    def row(bf16: Any, avx512: Any, tokens: str) -> list[float]:
        found = []
        for record in (bf16, avx512):
            for case in cases(record, shape=shape, tokens=int(tokens), routing="uniform"):
                for side in ("ours_bf16", "ours_fp8"):
                    of = case["sides"][side]
                    rate = 100 * of["share_of_read"] if int(tokens) <= 64 else of["gflop_per_s"]
                    found += [cpu_ratio(case, side), rate]
        return found

    return row


def _h200(record: Any, tokens: str) -> list[float]:
    """Return of one number of tokens what the table shows, columns with names of variants left out."""
    found = []
    for dtype in ("bf16", "fp8"):
        case = _one(record, shape="qwen3-30b-a3b", dtype=dtype, routing="uniform", tokens=int(tokens))
        best = _ours(case)
        found.append(vllm_us(case))
        if "deep_gemm" in case["sides"]:
            found.append(_median(case, "deep_gemm"))
        found += [ours_us(case), vllm_us(case) / ours_us(case), case["sides"][best]["share_of_floor_percent"]]
        if dtype == "fp8":
            found.append(min(_median(case, name) for name in case["sides"] if name.startswith(_KEEPING_BF16)))
    return found


def _h200_other(record: Any, layer: str, weights: str, routing: str) -> list[float]:
    names = {"Qwen3": "qwen3-30b-a3b", "Mixtr": "mixtral-8x7b-tp4", "16 ex": "deepseek-v3-ep16"}
    found = cases(record, shape=names[layer[:5]], dtype=weights.lower(), routing=routing)
    return [vllm_us(case) / ours_us(case) for case in sorted(found, key=lambda case: case["tokens"])]


def _from_logits(record: Any, weights: str) -> list[float]:
    return [
        _median(case, "vllm gate+experts") / _median(case, "flash_dmoe from logits")
        for case in sorted(
            cases(record, shape="qwen3-30b-a3b", dtype=weights.lower(), routing="uniform"),
            key=lambda each: each["tokens"],
        )
        if "flash_dmoe from logits" in case["sides"] and case["tokens"] <= 16
    ]


def _h100(record: Any, tokens: str) -> list[float]:
    found = []
    for dtype in ("bf16", "fp8"):
        case = _one(record, shape="qwen3-30b-a3b", dtype=dtype, routing="uniform", tokens=int(tokens))
        share = 100 * case["floor_us"] / ours_us(case)
        found += [vllm_us(case), ours_us(case), vllm_us(case) / ours_us(case), share]
    return found


_H100_LAYERS = {
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3-235B-A22B, a quarter (TP)": "qwen3-235b-a22b-tp4",
    "Qwen3-235B-A22B, an eighth (TP)": "qwen3-235b-a22b-tp8",
    "Qwen3-235B-A22B, 16 of 128 experts (EP)": "qwen3-235b-a22b-ep8",
    "GLM-4.5-Air, a half (TP)": "glm-4.5-air-tp2",
    "DeepSeek-V3, an eighth (TP)": "deepseek-v3-tp8",
    "DeepSeek-V3, 16 of 256 experts (EP)": "deepseek-v3-ep16",
    "Mixtral 8x7B, a half (TP)": "mixtral-8x7b-tp2",
    "Mixtral 8x7B, a quarter (TP)": "mixtral-8x7b-tp4",
    "Qwen3-Next-80B-A3B": "qwen3-next-80b-a3b",
    "Qwen3-Next-80B-A3B, a half (TP)": "qwen3-next-80b-a3b-tp2",
    "OLMoE-1B-7B": "olmoe-1b-7b",
}


def _h100_layer(record: Any, layer: str) -> list[float]:
    found: list[float] = []
    for dtype in ("bf16", "fp8"):
        ratios = [vllm_us(case) / ours_us(case) for case in cases(record, shape=_H100_LAYERS[layer], dtype=dtype)]
        if ratios:
            found += [min(ratios), max(ratios), sum(ratio < 1 for ratio in ratios), len(ratios)]
    return found


def _over_routings(shape: str, dtype: str, *records: Any) -> list[TokenSpeeds]:
    """Return what a table has of a layer: our kernels that are slower under no routing, means over the routings."""
    timed: dict[int, list[Any]] = {}
    for record in records:
        for case in cases(record, shape=shape, dtype=dtype):
            timed.setdefault(case["tokens"], []).append(case)
    rows = []
    for tokens, of_it in sorted(timed.items()):
        kept = [
            name
            for name in of_it[0]["sides"]
            if name.startswith(("direct", "grouped-"))
            if all(name in case["sides"] and _median(case, name) <= vllm_us(case) for case in of_it)
        ]
        means = {name: geometric_mean(_median(case, name) for case in of_it) for name in (_VLLM, *kept)}
        rows.append(TokenSpeeds(tokens=tokens, stock_us=means.pop(_VLLM), ours_us=means))
    return rows


def _h200_layer(first: Any, second: Any, layer: str) -> list[float]:
    """Return the least and the largest ratio in BF16 and in FP8, each with its number of tokens."""
    found: list[float] = []
    for dtype in ("bf16", "fp8"):
        rows = _over_routings(_H100_LAYERS[layer], dtype, first, second)
        ratios = [(row.stock_us / min(row.ours_us.values()), row.tokens) for row in rows]
        if ratios:
            found += [*min(ratios), *max(ratios)]
    return found


def _slower_than_vllms(*records: Any) -> list[int]:
    """Return in how many cases none of ours is as fast as vLLM's kernel, and how many there are."""
    ratios = [vllm_us(case) / ours_us(case) for record in records for case in record["cases"]]
    return [sum(ratio < 1 for ratio in ratios), len(ratios)]


def _ahead_nowhere(*records: Any) -> list[float]:
    slower, number = _slower_than_vllms(*records)
    assert slower == 0, f"vLLM's kernels are ahead in {slower} cases"
    closest = min(vllm_us(case) / ours_us(case) for record in records for case in record["cases"])
    return [number, 100 * (closest - 1)]


def _left_to_vllm(*records: Any) -> list[float]:
    """Return the first and last number of tokens of each range that plans leave to vLLM's kernels."""
    found: dict[str, list[float]] = {}
    for shape in _H100_LAYERS.values():
        for dtype in ("bf16", "fp8"):
            first = 1
            for each in token_ranges(_over_routings(shape, dtype, *records)):
                if each.use == STOCK:
                    found.setdefault(f"{shape} {dtype}", []).extend((first, each.up_to))
                first = each.up_to + 1
    said = ("qwen3-next-80b-a3b", "mixtral-8x7b-tp2", "deepseek-v3-tp8", "glm-4.5-air-tp2")
    assert set(found) == {f"{shape} bf16" for shape in said}, found
    return [tokens for shape in said for tokens in found[f"{shape} bf16"]]


def _experts_us(record: Any, side: str, batch: int) -> float:
    """Return the time of the experts. The record's ledgers have the norm in front of them in that group."""
    ledger, profile = (
        next(each for each in record["sides"][side][name] if each["batch"] == batch) for name in ("ledgers", "profiles")
    )
    experts = next(row["us"] for row in ledger["rows"] if row["group"] == "experts")
    return experts - sum(kernel["us"] for kernel in profile["kernels"] if kernel["name"].endswith("_moe_forward_0"))


def _step(record: Any, batch: str) -> list[float]:
    stock, ours = (
        next(ledger for ledger in record["sides"][side]["ledgers"] if ledger["batch"] == int(batch))
        for side in ("stock", "ours")
    )
    rows = {row["group"]: row for row in ours["rows"]}
    return [
        stock["step_us"], ours["step_us"], _experts_us(record, "stock", int(batch)),
        _experts_us(record, "ours", int(batch)), rows["experts"]["least_us"],
        rows["matrices"]["us"], rows["matrices"]["least_us"], rows["attention"]["us"], rows["gate top-k"]["us"],
    ]  # fmt: skip


def _ledger(record: Any, side: str, batch: int) -> Any:
    return next(each for each in record["sides"][side]["ledgers"] if each["batch"] == batch)


def _step_of_both(record: Any, batch: str) -> list[float]:
    """Return times of stock vLLM and of ours, and floors. A group that a side does not have is left out."""
    stock, ours = (_ledger(record, side, int(batch)) for side in ("stock", "ours"))
    found = [stock["step_us"], ours["step_us"], stock["step_us"] / ours["step_us"]]
    for group in ("experts", "matrices", "gate top-k", "attention"):
        rows = [row for ledger in (stock, ours) for row in ledger["rows"] if row["group"] == group]
        found += [row["us"] for row in rows]
        found += [rows[0]["least_us"]] if group in ("experts", "matrices") else []
    return found


def _all_kernels_us(ledger: Any) -> float:
    return sum(row["us"] for row in ledger["rows"])


def _kernels_of_one_request(record: Any) -> list[float]:
    return [_all_kernels_us(_ledger(record, side, 1)) for side in ("stock", "ours")]


def _earlier_step(record: Any) -> list[float]:
    ledger = _ledger(record, "ours", 1)
    return [ledger["step_us"], _all_kernels_us(ledger)]


def _in_flight(record: Any, kernels: str, _tokens: str) -> list[float]:
    """Least and largest share of the time of the kernel as it is that products in flight take, of single blocks."""
    mode, form = next(
        (mode, form) for mode, form in (("mxfp4_weights-", "/1200"), ("int4_weights-", "/1200"), ("mxfp4-", "/100"))
        if mode.removesuffix("-").upper() in kernels
    )  # fmt: skip
    shares = [
        side["median_us"] / case["sides"][name.removesuffix(form)]["median_us"]
        for case in record["cases"] for name, side in case["sides"].items()
        if name.startswith(mode) and name.endswith(form) and "x2" not in name
        if name.removesuffix(form) in case["sides"]
    ]  # fmt: skip
    return [min(shares), max(shares)]


def _us_of_forms(record: Any, tokens: int, *names: str) -> list[float]:
    return [next(case["sides"][name]["median_us"] for case in cases(record, dtype="mxfp4", tokens=tokens)
                 if name in case["sides"]) for name in names]  # fmt: skip


def _two_blocks(record: Any, dtype: str, mode: str) -> list[float]:
    case = _one(record, dtype=dtype, tokens=64)
    return [_median(case, f"grouped-{mode}-n16b2"), _median(case, f"grouped-{mode}-n16")]


def _parts(record: Any, tokens: str) -> list[float]:
    (floor,) = {case["floor_us"] for case in cases(record, dtype="mxfp4", tokens=int(tokens))}
    forms = ("", "/700", "/800", "/900", "/1000", "/1100")
    return [floor, *_us_of_forms(record, int(tokens), *(f"mxfp4_weights-n16{form}" for form in forms), "marlin")]


def _copies_of_exponents(record: Any) -> list[float]:
    pairs = (_us_of_forms(record, tokens, "mxfp4_weights-n16", "mxfp4_weights-n16/800") for tokens in (16, 64))
    return [whole - without for whole, without in pairs]


def _four_bits_on_a_cpu(avx512: Any, avx2: Any, tokens: str) -> list[float]:
    """Return how many times as fast as FP8, and the share of the read rate in percent."""
    found: list[float] = []
    for record, formats in ((avx512, ("mxfp4", "int4-32", "int4-128")), (avx2, ("mxfp4", "int4-128"))):
        for case in cases(record, tokens=int(tokens)):
            for name in formats:
                side = f"ours_{name}"
                found += [case["ratio_to_ours_fp8"][side]["median"], 100 * case["sides"][side]["share_of_read"]]
            if record is avx512:
                found.append(100 * case["sides"]["ours_fp8"]["share_of_read"])
    return found


def _least_and_most_over_fp8(record: Any) -> list[float]:
    ratios = [case["ratio_to_ours_fp8"][f"ours_{name}"]["median"] for case in record["cases"]
              for name in ("mxfp4", "int4-32", "int4-128")]  # fmt: skip
    return [min(ratios), max(ratios)]


CLAIMS = [
    Claim(
        "docs/adr/0013-two-chained-launches-for-small-batches.md",
        "they take {50.4} us",
        (_H200,),
        lambda found: [
            _median(_one(found, shape="mixtral-8x7b-tp4", dtype="bf16", routing="uniform", tokens=1), "direct")
        ],
    ),
    *(
        Table(_PAGE, "| T |", after, 1, (_CPU_BF16, _CPU_AVX512), _cpu(shape))
        for after, shape in (
            ("A layer of Qwen3-30B-A3B", "qwen3-30b-a3b"),
            ("A layer of OLMoE-1B-7B", "olmoe-1b-7b"),
            ("A quarter of Mixtral 8x7B", "mixtral-8x7b-tp4"),
            ("16 experts of the size of DeepSeek-V3", "deepseek-v3-ep16"),
        )
    ),
    Table(
        _PAGE, "| T |", "### Four bits beside FP8", 1, (_CPU_FOUR_BIT_AVX512, _CPU_FOUR_BIT_AVX2), _four_bits_on_a_cpu
    ),
    Claim(
        "docs/passes/four_bit.md",
        "{1.5} to {1.9} times as fast as in FP8\nwith AVX-512 BF16",
        (_CPU_FOUR_BIT_AVX512,),
        _least_and_most_over_fp8,
    ),
    Table(_PAGE, "| T |", "longer.", 1, (_H200,), _h200),
    Table(_PAGE, "| T |", "Speed from router logits", 1, (_H200,), _from_logits),
    Table(_PAGE, "| layer |", "Ratios of other layers", 3, (_H200,), _h200_other),
    Table(_PAGE, "| layer, one H200 |", "### Ten more layers", 1, _MORE_LAYERS, _h200_layer),
    Claim(
        _PAGE,
        "in each of the {504} cases one of ours is faster, in the closest by {0.5} %",
        _MORE_LAYERS,
        _ahead_nowhere,
    ),
    Claim(
        _PAGE,
        "Qwen3-Next-80B-A3B from {65} to {512} tokens, a half of Mixtral 8x7B from {3} to {4} and from {9} to\n{16}, "
        "an eighth of DeepSeek-V3 from {257} to {511} and a half of GLM-4.5-Air from {129} to {255}",
        _MORE_LAYERS,
        _left_to_vllm,
    ),
    Claim(
        "docs/kernels.md",
        "uniform and Zipf routing, {504} cases on one H200",
        _MORE_LAYERS,
        lambda *found: _ahead_nowhere(*found)[:1],
    ),
    Table(_PAGE, "| T |", "Qwen3-30B-A3B, uniform routing:", 1, (_H100,), _h100),
    Table(_PAGE, "| layer |", "Every layer that was timed", 1, (_H100,), _h100_layer),
    Table(_PAGE, "| kernels | T | time over", "Four bits: tried on an H100", 2, (_FORMS,), _in_flight),
    Table(_PAGE, "| T | floor |", "Four bits: tried on an H100", 1, (_FORMS,), _parts),
    Claim(
        _PAGE,
        "take {638.3} us at 4096 tokens and {625.1} with products in flight; single blocks, as they are, {559.0}",
        (_FORMS,),
        lambda found: _us_of_forms(found, 4096, "mxfp4-n128x2", "mxfp4-n128x2/100", "mxfp4-n128"),
    ),
    Claim(
        _PAGE, "instead of 5 takes {136.8} us", (_FORMS,), lambda found: _us_of_forms(found, 64, "mxfp4_weights-n16/3")
    ),
    Claim(
        _PAGE,
        "the kernel as it is takes {141.1}",
        (_FORMS,),
        lambda found: _us_of_forms(found, 64, "mxfp4_weights-n16"),
    ),
    Claim(
        _PAGE,
        "At 64 tokens they took {149.9} us of `MXFP4_WEIGHTS` where one block took {140.9}",
        (_TWO_BLOCKS,),
        lambda record: _two_blocks(record, "mxfp4", "mxfp4_weights"),
    ),
    Claim(
        _PAGE,
        "layer {919.9} us where one block took {706.6}",
        (f"{_TWO_BLOCKS}_gpt_oss",),
        lambda record: _two_blocks(record, "mxfp4", "mxfp4_weights"),
    ),
    Claim(
        _PAGE,
        "took {160.0} us where one block with copies stage by stage took {179.5}",
        (_TWO_BLOCKS,),
        lambda record: _two_blocks(record, "int4_g128", "int4_weights"),
    ),
    Claim(_PAGE, "their copies cost {10.1} and {17.7} us", (_FORMS,), _copies_of_exponents),
    Table(_PAGE, "| batch |", "Where a decode step's time goes", 1, (_STEP,), _step),
    Table(_PAGE, "| requests, H200 |", "Stock vLLM and our balanced plan", 1, (_STEP_H200,), _step_of_both),
    Claim(
        _PAGE,
        "all\nkernels take {3880} us in stock vLLM and {3199} in ours",
        (_STEP_H200,),
        _kernels_of_one_request,
    ),
    Claim(_PAGE, "had a step of {4020} us, with kernels of {3213} us", (f"{_STEP_H200}_ours",), _earlier_step),
]
