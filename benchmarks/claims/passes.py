"""Lists the numbers of the pages of the other passes."""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks.claims.claim import Claim, Table
from moe_optimizer.passes.graph_capture import STEP_US, TOKEN_US
from moe_optimizer.passes.speculation.step_costs import (
    AHEAD_STEP_US,
    AHEAD_TOKEN_US,
    DRAFTED_TOKEN_US,
    DRAFTING_STEP_US,
)

_LAYOUTS = "2026-11-21_h200_layouts"
_DISAGGREGATION = "2026-11-20_epyc_disaggregation"
_LOAD_CPU = "2026-11-20_epyc_expert_load"
_LOAD_GPU = "2026-11-20_h200_expert_load"
_PLACEMENT = "2026-11-21_epyc_placement"
_SPECULATION = "2026-11-23_epyc_speculation"
_VERIFY_STEPS = "2026-11-25_h100_verify_steps"
BESIDE_STOCK, _NORM_ROPE = "2026-11-27_h100_one_client", "2026-11-27_h100_norm_rope_clients"
_TWO_DRAFTS, _BESIDE = "2026-11-26_h200_verify_two_drafts", "2026-11-26_h200_four_bit_beside_marlin"
_TUNED = "2026-11-20_h200_tuned_configs"
_DECODE_STEP = "2026-11-22_h100_decode_step"
PROMPT_STEPS = ("2026-11-26_h100_prompt_step", "2026-11-26_h100_prompt_step_graphs")
_TUNED_PLAN = "2026-11-26_h200_tuned_plan_served"
_TUNED_MODEL = "2026-11-26_h200_tuned_qwen3-30b-a3b"
_CLIENTS = ("1", "16", "128")


def _tpot_at_256(record: Any, side: str) -> float:
    (loads,) = (each["loads"] for each in record["sides"] if each["name"] == side)
    return next(load["tpot_ms"]["median"] for load in loads if load["clients"] == 256)


def prompt_steps(launched: Any, captured: Any) -> list[float]:
    """In ms: a prompt of 1,024 tokens without a graph, its kernels, with one; of 2,048 without and with one."""
    without, graph = ([record["prompts"][each] for each in ("1024", "2048")] for record in (launched, captured))
    us = [without[0]["us"], without[0]["kernels_us"], graph[0]["us"], without[1]["us"], graph[1]["us"]]
    return [each / 1000 for each in us]


def _prompt_graphs(record: Any) -> list[float]:
    """The median time to the first token with graphs of prompts over that without, with 16 and 128 clients, and by how
    much their tokens per second differ at most, in percent.
    """
    without, graphs = ({load["clients"]: load for load in layout["loads"]} for layout in record["layouts"].values())
    first = [graphs[clients]["ttft_ms"]["median"] / without[clients]["ttft_ms"]["median"] for clients in (16, 128)]
    rates = [graphs[clients]["output_tokens_per_s"] / without[clients]["output_tokens_per_s"] for clients in (16, 128)]
    return [*first, 100 * max(abs(rate - 1) for rate in rates)]


def _decode_tokens(record: Any, side: str) -> list[float]:
    """Return the us of a step of 64 requests, and of each further one without the attention."""
    steps = {each["batch"]: each for each in record["sides"][side]["ledgers"]}
    rest = {
        batch: step["step_us"] - sum(row["us"] for row in step["rows"] if row["group"] == "attention")
        for batch, step in steps.items()
    }
    return [steps[64]["step_us"], (rest[128] - rest[64]) / 64]


def _padded(record: Any, padding: int, tokens: int) -> float:
    """Return the percentage of a step that padding takes; the constants of the plan must be the record's."""
    step_us, token_us = _decode_tokens(record, "stock")
    assert abs(token_us - TOKEN_US) < 0.05
    assert abs(step_us - 64 * TOKEN_US - STEP_US) < 10
    return 100 * padding * TOKEN_US / (STEP_US + tokens * TOKEN_US)


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


_DRAFTING_SIDES = {
    "without drafts": "plain",
    "two drafts, one step after the other": "drafts",
    "two drafts, steps prepared ahead": "drafts-async",
}


def _stock_beside_drafts(stock: Any, drafting: Any) -> list[float]:
    plain = _side_by_side(stock, "stock", "tpot_ms")[0]
    return [plain, plain / _side_by_side(drafting, "drafts-async", "tpot_ms")[0]]


def _side_by_side(record: Any, side: str, key: str, *, workload: str = "") -> list[float]:
    """Return what the first bench that has a side, under a workload whose name ends so, found at each load."""
    loads = next(
        each["loads"]
        for bench in record["benches"]
        if bench["workload"].endswith(workload)
        for each in bench["sides"]
        if each["name"] == side
    )
    return [load[key] if key == "output_tokens_per_s" else load[key]["median"] for load in loads]


def _two_drafts(record: Any, steps: str) -> list[float]:
    return _side_by_side(record, _DRAFTING_SIDES[steps], "tpot_ms")


def _faster_by_two(record: Any) -> list[float]:
    found: list[float] = []
    for side in ("drafts-async", "drafts"):
        (bench,) = [each for each in record["benches"] if each["sides"][1]["name"] == side]
        plain, drafting = ([load["tpot_ms"]["median"] for load in each["loads"]] for each in bench["sides"])
        gains = [one / other for one, other in zip(plain, drafting, strict=True)]
        found += [min(gains), max(gains)]
    return found


_BESIDE_ROWS = {"time per output token, ms": "tpot_ms", "output tokens per second": "output_tokens_per_s",
                "time to the first token, ms": "ttft_ms"}  # fmt: skip


def _beside(record: Any, metric: str, prompt: str, clients: str) -> list[float]:
    workload = "served.yaml" if prompt == "512" else "ttft.yaml"
    place = {"served.yaml": ("1", "16", "64", "256"), "ttft.yaml": ("1", "8")}[workload].index(clients)
    ours, stock = (
        _side_by_side(record, side, _BESIDE_ROWS[metric], workload=workload)[place] for side in ("four-bit", "stock")
    )
    (verdict,) = [
        each
        for bench in record["benches"]
        if bench["workload"].endswith(workload)
        for each in bench["verdicts"]
        if each["metric"] == _BESIDE_ROWS[metric] and each["load"].split()[0] == clients
    ]
    return [ours, stock, verdict["ratio"], verdict["low"], verdict["high"]]


_FOUR_BITS_SERVED = ("2026-11-28_h200_four_bit_beside_gptq", "2026-11-28_h200_four_bit_beside_bf16")
"""Their benches have 64 clients, 16 and 1."""


def _four_bits(gptq: Any, bf16: Any, other: str, clients: str) -> list[float]:
    bench = (gptq if other == "GPTQ" else bf16)["benches"][("64", "16", "1").index(clients)]
    ours, stock = (side["loads"][0] for side in bench["sides"])
    tpot, rate = (
        next(each for each in bench["verdicts"] if each["metric"] == metric)
        for metric in ("tpot_ms", "output_tokens_per_s")
    )
    return [
        ours["tpot_ms"]["median"], stock["tpot_ms"]["median"], tpot["ratio"], tpot["low"], tpot["high"],
        ours["output_tokens_per_s"], stock["output_tokens_per_s"], rate["ratio"], rate["low"], rate["high"],
    ]  # fmt: skip


def _four_bits_first_tokens(gptq: Any, bf16: Any) -> list[float]:
    """Medians in ms: 16 clients of GPTQ and ours; 64 of ours, the least and the most, of GPTQ and of BF16."""

    def first(record: Any, number: int, side: int) -> float:
        return record["benches"][number]["sides"][side]["loads"][0]["ttft_ms"]["median"]

    ours = sorted((first(gptq, 0, 0), first(bf16, 0, 0)))
    return [first(gptq, 1, 1), first(gptq, 1, 0), *ours, first(gptq, 0, 1), first(bf16, 0, 1)]


def _without_prompts(ledgers: Any, bf16: Any) -> list[float]:
    (step_us,) = (each["step_us"] for each in ledgers["sides"]["ours"]["ledgers"] if each["batch"] == 64)
    rate = 64e6 / step_us
    return [rate, rate / bf16["benches"][0]["sides"][1]["loads"][0]["output_tokens_per_s"]]


def _ledger_of_four_bits(record: Any) -> list[float]:
    ledgers = record["sides"]["ours"]["ledgers"]
    groups = [{row["group"]: row["us"] for row in ledger["rows"]} for ledger in ledgers]
    us = [*(ledger["step_us"] for ledger in ledgers), *(each["experts"] for each in groups)]
    return [each / 1000 for each in (*us, *(each["attention"] for each in groups))]


def _beside_stock_alone(record: Any, name: str = "") -> list[float]:
    """Return what the second side of the first bench, or of the one with this second side, is beside its first."""
    bench = next(each for each in record["benches"] if name in ("", each["sides"][1]["name"]))
    first, second = (side["loads"][0]["tpot_ms"]["median"] for side in bench["sides"])
    verdict = next(each for each in bench["verdicts"] if each["metric"] == "tpot_ms")
    return [second, first, 1 / verdict["ratio"], 1 / verdict["high"], 1 / verdict["low"]]


def _without_drafts(record: Any) -> list[float]:
    ours, _, *gain = _beside_stock_alone(record, "plain")
    (step,) = (
        side["loads"][0]["itl_ms"]["median"]
        for bench in record["benches"]
        for side in bench["sides"]
        if side["name"] == "drafts"
    )
    return [ours, *gain, ours / _beside_stock_alone(record)[0], step]


def _steps_with_drafts(on_h100: Any, on_h200: Any) -> list[float]:
    gaps = [
        side["loads"][0]["itl_ms"]["median"]
        for record in (on_h100, on_h200)
        for bench in record["benches"]
        for side in bench["sides"]
        if side["name"] in ("drafts", "drafts-async")
    ]
    return [gaps[0], gaps[1], on_h100["sides"]["stock"]["ready_s"]]


_E4M3_SERVED, _ONE_CLIENT = "2026-11-26_h100_e4m3_served", "2026-11-26_h100_one_client"
_FEW_CLIENTS = {
    "`gate_topk`": "router",
    "attention without splits in graphs": "splits",
    "both, and vLLM's fusion of QK norm and RoPE": "all",
}


def _pair_of(record: Any, other: str, metric: str, clients: str, *, workload: str = "") -> tuple[list[float], Any]:
    """Return what the first side and another one had when loaded in turns, and the verdict."""
    (bench,) = [
        each for each in record["benches"] if each["workload"].endswith(workload) and each["sides"][1]["name"] == other
    ]
    loads = [load for side in bench["sides"] for load in side["loads"] if str(load["clients"]) == clients]
    (verdict,) = [each for each in bench["verdicts"] if each["metric"] == metric and each["load"].split()[0] == clients]
    return [load[metric] if metric == "output_tokens_per_s" else load[metric]["median"] for load in loads], verdict


def _e4m3_served(record: Any, metric: str, prompt: str, clients: str) -> list[float]:
    workload = "at64.yaml" if prompt == "512" else "ttft.yaml"
    found, verdict = _pair_of(record, "stock", _BESIDE_ROWS[metric], clients, workload=workload)
    return [*found, verdict["ratio"], verdict["low"], verdict["high"]]


def _few_clients(record: Any, what: str) -> list[float]:
    """The first side is plain, so a side is as much faster as plain is slower."""
    found, verdict = _pair_of(record, _FEW_CLIENTS[what], "tpot_ms", "1")
    return [*found, 1 / verdict["ratio"], 1 / verdict["high"], 1 / verdict["low"]]


def _with_norm_rope_fusion(record: Any) -> list[float]:
    (plain, fused), verdict = _pair_of(record, "qk", "tpot_ms", "1")
    return [fused, plain, *(1 / verdict[bound] for bound in ("ratio", "high", "low"))]


def _norm_rope_beside_skinny(record: Any) -> list[float]:
    found = []
    for clients in ("1", "16"):
        benches = [each for each in record["benches"] if each["verdicts"][0]["load"].split()[0] == clients]
        times, verdict = _pair_of({"benches": benches}, "plain", "tpot_ms", clients)
        found += [*times, verdict["low"], verdict["high"]]
    return found


def one_client_beside_stock(record: Any) -> list[float]:
    """Return times per token with skinny_gemm and of stock vLLM, their ratio with its bounds; the same without it."""
    (stock, ours), verdict = _pair_of(record, "skinny", "tpot_ms", "1")
    (_, plain), without = _pair_of(record, "plain", "tpot_ms", "1")
    ratios = [1 / each[bound] for each in (verdict, without) for bound in ("ratio", "high", "low")]
    return [ours, stock, *ratios[:3], plain, *ratios[3:]]


def _longer_step(record: Any, requests: str) -> list[float]:
    found = record["results"][requests]["quantiles"]["50%"]
    low, high = found["ratio_interval_95"]
    return [found["off_ms"], *(100 * (each - 1) for each in (found["ratio"], low, high))]


def _added_us(record: Any) -> list[float]:
    added = [1000 * (of["quantiles"]["50%"]["on_ms"] - of["quantiles"]["50%"]["off_ms"])
             for of in record["results"].values()]  # fmt: skip
    return [min(added), max(added)]


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


def _kept(record: Any) -> list[float]:
    gains = {size["tokens"]: size["ratio"] for size in record["sizes"]}
    return [gains[64], gains[4096]]


def _same_row(record: Any) -> list[float]:
    return [max(100 * abs(size["ratio"] - 1) for size in record["sizes"] if size["same_row"])]


def _tuned_row(record: Any, what: str, _against: str) -> list[float]:
    step = {"the plan": "plan", "the result": "result"}.get(what, "ablation")
    entry = next(
        each
        for each in record["entries"]
        if each["step"] == step and (step != "ablation" or f"`{each['what']}`" == what)
    )
    return [entry[key] for key in ("ratio", "low", "high")]


def _tuned_served(record: Any, clients: str) -> list[float]:
    assert not [each for each in record["verdicts"] if each["metric"] == "ttft_ms" and "no" not in each["verdict"]]
    of_load = [each for each in record["verdicts"] if each["load"].split()[0] == clients]
    found = {each["metric"]: [each["ratio"], each["low"], each["high"]] for each in of_load}
    return [*found["output_tokens_per_s"], *found["tpot_ms"]]


def _tuned_settings(record: Any) -> list[float]:
    scores = {each["what"]: each["score"] for each in record["entries"] if each["step"] == "setting"}
    other = next(score for what, score in scores.items() if what.endswith("--moe-backend deep_gemm"))
    return [other, scores["without tuned_configs"], record["spent_s"], record["budget_s"]]


CLAIMS = [
    Table("docs/passes/disaggregation.md", "| | one server", "Measured on two cores", 1, (_DISAGGREGATION,),
          _disaggregation),
    Claim("docs/passes/disaggregation.md", "after a pause of up to {642} ms", (_DISAGGREGATION,),
          lambda found: [found["results"]["prefill and decode"]["between_tokens_ms"]["long prompts"]["max"]]),
    Claim("docs/passes/speculation.md",
          "{3.66} ms without, {2.59} ms with drafts, {1.41}x ({1.22}x to {1.54}x), {80} % of the drafts accepted, "
          "{40} of", (_SPECULATION,), _speculation),
    Table("docs/passes/speculation.md", "| experts | drafts |", "Times of a step", 2, (_VERIFY_STEPS,), _verify_steps),
    Claim("docs/passes/speculation.md",
          "made tokens {1.11} to {1.50} times as fast in BF16, and {1.07} to {1.26} times in four bits",
          (_VERIFY_STEPS,), _faster_by_drafts),
    Claim("docs/passes/speculation.md", "about {2.5} ms more than a plain one and {44} us for each draft", (),
          lambda: [DRAFTING_STEP_US / 1000, DRAFTED_TOKEN_US]),
    Table("docs/passes/speculation.md", "| steps | 1 client", "the three servers side by side", 1, (_TWO_DRAFTS,),
          _two_drafts),
    Claim("docs/passes/scheduler.md",
          "took {28.10} ms per token at 256 clients, the balanced one in FP8 with 8192 took {24.16}",
          ("2026-11-24_h100_profiles_served", "2026-11-23_h100_fp8_one_gpu_served"),
          lambda wide, narrow: [_tpot_at_256(wide, "aggressive"), _tpot_at_256(narrow, "fp8+flash_dmoe")]),
    Claim("docs/passes/graph_capture.md",
          "a prompt of 1,024 tokens takes {91} ms, of which kernels\n{31} ms, and with a graph of that size {36} ms; "
          "of 2,048 tokens {107} and {48} ms", PROMPT_STEPS, prompt_steps),
    Claim("docs/passes/graph_capture.md",
          "the time to the\nfirst token fell to {0.85}x, with 128, where 513 tokens were padded to 1024, it rose to "
          "{1.17}x, tokens per second stayed within {0.1} %",
          ("2026-11-26_h100_layouts_graphs",), _prompt_graphs),
    Claim("docs/passes/graph_capture.md",
          "took {24,925} us with 64 requests, and\nwithout the attention {21.2} us more for each further one",
          (_DECODE_STEP,), lambda found: _decode_tokens(found, "stock")),
    Claim("docs/passes/graph_capture.md",
          "So 8 more padded tokens\ntake {0.6} % of a step of 129, and 16 take {1.0} % of a step of 513",
          (_DECODE_STEP,), lambda found: [_padded(found, 8, 129), _padded(found, 16, 513)]),
    Claim("docs/passes/graph_capture.md", "With our kernels it is {11.1} us", (_DECODE_STEP,),
          lambda found: _decode_tokens(found, "ours")[1:]),
    Claim("docs/passes/speculation.md", "took {4.12} ms at one client ([record](../../benchmarks/records/"
          "2026-11-26_h200_stock_bf16.json)): {1.98} times as long",
          ("2026-11-26_h200_stock_bf16", _TWO_DRAFTS), _stock_beside_drafts),
    Claim("docs/passes/speculation.md",
          "it was {3.72} ms with drafts and {4.51} with stock vLLM, only {1.22} times ({1.02} to {1.46};",
          ("2026-11-28_h100_two_drafts",), _beside_stock_alone),
    Claim("docs/passes/speculation.md", "gave {2.70} ms with drafts and {3.92} with\nstock vLLM, "
          "{1.42} times ({1.22} to {1.64})",
          ("2026-11-28_h200_two_drafts",), _beside_stock_alone),
    Claim("docs/passes/speculation.md", "without drafts {2.87} ms, {1.36} times ({1.36} to {1.37}), so drafts "
          "themselves gained {1.06} times,\nwhich is within that spread; a step with drafts took {5.38} ms",
          ("2026-11-28_h200_two_drafts",), _without_drafts),
    Claim("docs/passes/speculation.md", "took {7.46} ms there, by the median gap between tokens, where on that H200 it "
          "took {4.41}: the host was slow\n(stock vLLM was ready after {122} s)",
          ("2026-11-28_h100_two_drafts", _TWO_DRAFTS), _steps_with_drafts),
    Claim("docs/passes/speculation.md",
          "two drafts made tokens {1.30} to {1.57} times as fast, otherwise {1.09} to {1.29} times", (_TWO_DRAFTS,),
          _faster_by_two),
    Claim("docs/passes/speculation.md", "count about {0.4} ms and {14} us for each draft", (),
          lambda: [AHEAD_STEP_US / 1000, AHEAD_TOKEN_US]),
    Table("docs/passes/four_bit.md", "| | prompt | clients |", "Two days before", 3, (_BESIDE,), _beside),
    Table("docs/passes/four_bit.md", "| ours beside |", "Beside a 4-bit checkpoint", 2, _FOUR_BITS_SERVED, _four_bits),
    Claim("docs/passes/four_bit.md", "first tokens took {201} ms, ours {129}. With 64 clients first tokens took {389} "
          "to {407} ms with ours, {490} with GPTQ and {288} in BF16", _FOUR_BITS_SERVED, _four_bits_first_tokens),
    Claim("docs/passes/four_bit.md", "took {3.10}, {7.16}, {10.14} and {14.62} ms at 1, 16, 64 and 256 requests, of it "
          "the experts {1.00}, {4.24}, {6.18} and {6.94} ms, attention {0.51}, {0.80}, {1.61}\nand {3.52}",
          ("2026-11-28_h200_decode_step_four_bits",), _ledger_of_four_bits),
    Claim("docs/passes/four_bit.md", "64 requests would have {6,314}\ntokens/s, {2.20} times those of BF16",
          ("2026-11-28_h200_decode_step_four_bits", _FOUR_BITS_SERVED[1]), _without_prompts),
    Claim("docs/passes/skinny_gemm.md", "on one H200 {2.81} and {2.90}, {1.03}x\n({1.03} to {1.03};",
          ("2026-11-28_h200_fp8_few_clients",), _beside_stock_alone),
    Claim("docs/passes/skinny_gemm.md", "the experts it was {4.87} and {4.80} ms, {0.99}x ({0.98} to {0.99};",
          ("2026-11-28_h100_fp8_few_clients",), _beside_stock_alone),
    Claim("moe_optimizer/passes/skinny_gemm/skinny_gemm.py", "{1.03}x as fast with it, one with 16 clients {0.99}x",
          ("2026-11-28_h200_fp8_few_clients", "2026-11-28_h100_fp8_few_clients"),
          lambda *found: [_beside_stock_alone(each)[2] for each in found]),
    Table("docs/passes/four_bit.md", "| E4M3 | prompt | clients |", "With E4M3 products in steps", 3, (_E4M3_SERVED,),
          _e4m3_served),
    Claim("docs/passes/four_bit.md", "took {45.1} and {45.4} ms at one client, {205.6} and {224.5} at eight",
          (_E4M3_SERVED,), lambda found: [value for clients in ("1", "8")
                                          for value in _pair_of(found, "bf16", "ttft_ms", clients)[0]]),
    Table("docs/passes/flash_dmoe.md", "| with | plain |", "Served on one H100, one client", 1, (_ONE_CLIENT,),
          _few_clients),
    Claim("docs/passes/four_bit.md",
          "took {4.12} ms at one client and {19.36} ms at 64, and gave {229} and {2,912}\ntokens per second",
          ("2026-11-26_h200_stock_bf16",),
          lambda found: [number for key in ("tpot_ms", "output_tokens_per_s")
                         for number in _side_by_side(found, "stock", key)]),
    Claim("docs/passes/skinny_gemm.md", "took {3.03} ms with it and {3.10} without",
          ("2026-11-28_h100_skinny_gemm_fp8_one_client",),
          lambda found: [side["loads"][0]["tpot_ms"]["median"] for side in reversed(found["benches"][0]["sides"])]),
    Claim("docs/passes/skinny_gemm.md", "takes {3.66} ms where stock vLLM takes {4.50}, {1.23}x as fast ({1.21} to "
          "{1.24}); without this pass our plan has {3.90}, {1.15}x\n({1.15} to {1.16})", (BESIDE_STOCK,),
          one_client_beside_stock),
    Claim("docs/passes/norm_rope_fusion.md", "a token took {3.64} ms with it and {3.66} without ({1.00} to {1.02}), "
          "with 16 clients {6.15} and {6.15} ({0.99} to {1.01}", (_NORM_ROPE,), _norm_rope_beside_skinny),
    Claim("docs/passes/norm_rope_fusion.md",
          "a token took {3.88} ms with it and {3.97} ms without: {1.02} times as fast ({1.00} to {1.03};",
          ("2026-11-27_h100_norm_rope_fusion",), _with_norm_rope_fusion),
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
    Table("docs/passes/parallelism.md", "| layout |", "**Measured layouts.**", 1, (_LAYOUTS,), _layouts),
    Claim("docs/passes/parallelism.md", "ready {136} s after the first\ncommand", ("2026-11-26_h100_x2_ray_nodes",),
          lambda found: [found["ready_s"]]),
    Claim("docs/passes/parallelism.md", "took {11.9} to {23.0} ms per token in slices, {12.3} to {16.5} with EP",
          (_LAYOUTS,), _spread),
    Table("docs/passes/replicas.md", "| | 1 client", "compared with slices", 1, (_LAYOUTS,), _replicas),
    Table("docs/tune.md", "| clients | output tokens/s |", "`bench` of that plan", 1, (_TUNED_PLAN,), _tuned_served),
    Table("docs/tune.md", "| what | against |", "## Seen", 2, (_TUNED_MODEL,), _tuned_row),
    Claim("docs/tune.md",
          "`--moe-backend deep_gemm` gave {4,808} tokens/s, {5,333} without it; vLLM refused `flashinfer_cutlass`. It "
          "ended after {1,092} of {1,440} s", (_TUNED_MODEL,), _tuned_settings),
    Claim("docs/passes/tuned_configs.md", "{1.035}x (64 tokens) and {1.044}x (4096 tokens)", (_TUNED,), _kept),
    Claim("docs/passes/tuned_configs.md", "differ by at most {0.6} %", (_TUNED,), _same_row),
]  # fmt: skip
