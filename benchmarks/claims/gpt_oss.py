"""Lists the numbers of the pages on gpt-oss: its layer beside triton_kernels, and its servers."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.claims.claim import Claim, Table, cases

_LAYER = "2026-11-28_h200_gpt_oss_experts"
_SERVED = (f"{_LAYER}_served_again", "2026-11-28_h200_gpt_oss_120b_served")
_SLICES = "2026-11-29_h200_four_bit_gpt_oss_tp2"
_ROUTINGS = ("uniform", "zipf")


def _layer_us(record: Any, routing: str, tokens: int) -> tuple[float, float, float, float]:
    """Return the times of triton_kernels less that of the choice, of Marlin, and of ours in BF16 and in E4M3."""
    (case,) = cases(record, dtype="mxfp4", shape="gpt-oss-120b", routing=routing, tokens=tokens)
    times = {name: side["median_us"] for name, side in case["sides"].items()}
    kept = min(us for name, us in times.items() if name.startswith(("direct", "grouped-mxfp4_weights-")))
    rounded = min((us for name, us in times.items() if name.startswith("grouped-mxfp4-")), default=float("inf"))
    return times["vllm"] - times["choice of experts"], times["marlin"], kept, rounded


def _layer(record: Any, tokens: str, *, routing: str = "uniform") -> list[float]:
    package, marlin, ours, _ = _layer_us(record, routing, int(tokens))
    return [package, marlin, ours, package / ours, marlin / ours]


def _over_triton(record: Any, powers: Sequence[int], *routings: str) -> list[float]:
    """Return the least and the most over triton_kernels, at these powers of two of tokens."""
    found = [_layer(record, str(2**power), routing=each)[3] for power in powers for each in routings]
    return [min(found), max(found)]


def _level(record: Any) -> list[float]:
    """Return the least and the most from 32 to 256 tokens, where samples of both overlap and nowhere else; at 32 the
    median of ours is the slower one.
    """
    level: dict[str, set[int]] = {}
    for case in cases(record, dtype="mxfp4", shape="gpt-oss-120b"):
        of = case["sides"]
        ours = min((name for name in of if name.startswith(("direct", "grouped-mxfp4_weights-"))),
                   key=lambda name: of[name]["median_us"])  # fmt: skip
        package = [us - of["choice of experts"]["median_us"] for us in of["vllm"]["samples_us"]]
        if max(of[ours]["samples_us"]) >= min(package):
            level.setdefault(case["routing"], set()).add(case["tokens"])
    assert level == {routing: {32, 64, 128, 256} for routing in _ROUTINGS}, level
    assert max(_over_triton(record, [5], *_ROUTINGS)) < 1
    return _over_triton(record, range(5, 9), *_ROUTINGS)


def _apart(record: Any) -> list[float]:
    """Return the least and the most of few tokens, in either routing; at one token; from 512 on."""
    (one,) = {round(each, 2) for each in _over_triton(record, [0], *_ROUTINGS)}
    few = [each for routing in _ROUTINGS for each in _over_triton(record, range(1, 5), routing)]
    return [*few, one, *_over_triton(record, range(9, 14), *_ROUTINGS)]


def _in_e4m3(record: Any) -> list[float]:
    times = [_layer_us(record, routing, 2**power) for power in range(9, 14) for routing in _ROUTINGS]
    ratios = [package / rounded for package, _, _, rounded in times]
    return [min(ratios), max(ratios)]


def _slices(record: Any) -> list[float]:
    """Return the least over triton_kernels at one token, then the least and the most from 2 to 256, from 512 on, and
    from 512 on of the fastest with E4M3.
    """
    kept: dict[int, list[float]] = {}
    rounded: list[float] = []
    for case in cases(record, dtype="mxfp4", shape="gpt-oss-120b-tp2"):
        times = {name: side["median_us"] for name, side in case["sides"].items()}
        package = times["vllm"] - times["choice of experts"]
        ours = min(us for name, us in times.items() if name.startswith(("direct", "grouped-mxfp4_weights-")))
        kept.setdefault(case["tokens"], []).append(package / ours)
        if case["tokens"] >= 512:
            rounded.append(package / min(us for name, us in times.items() if name.startswith("grouped-mxfp4-")))
    few = [each for tokens, found in kept.items() if 2 <= tokens <= 256 for each in found]
    many = [each for tokens, found in kept.items() if tokens >= 512 for each in found]
    return [min(kept[1]), min(few), max(few), min(many), max(many), min(rounded), max(rounded)]


def _served(again: Any, dummy: Any, layers: str, clients: str) -> list[float]:
    """Return tokens/s of ours and of vLLM's, their ratio and its interval, then the same of the time per token."""
    record = again if layers.startswith("12") else dummy
    bench = next(each for each in record["benches"] if each["sides"][0]["loads"][0]["clients"] == int(clients))
    ours, stock = (side["loads"][0] for side in bench["sides"])
    assert [side["name"] for side in bench["sides"]] == ["ours", "vllm"]
    rate, tpot = (
        next([each[key] for key in ("ratio", "low", "high")] for each in bench["verdicts"] if each["metric"] == metric)
        for metric in ("output_tokens_per_s", "tpot_ms")
    )
    rates = [side["output_tokens_per_s"] for side in (ours, stock)]
    return [*rates, *rate, *(side["tpot_ms"]["median"] for side in (ours, stock)), *tpot]


def _vllm_alone(record: Any) -> list[float]:
    """Return tokens/s and ms per token of one client of vLLM's server, beside which ours was refused."""
    assert record["sides"].keys() == {"vllm"}
    (load,) = (
        each["sides"][0]["loads"][0] for each in record["benches"] if each["sides"][0]["loads"][0]["clients"] == 1
    )
    return [load["output_tokens_per_s"], load["tpot_ms"]["median"]]


def _off_in_graphs(again: Any) -> list[float]:
    """Return of how many graphs how many passed, and by how much they were off."""
    said = next(row[5] for row in again["sides"]["ours"]["table"] if row[0] == "flash_dmoe")
    return [float(each) for each in re.findall(r"passed in (\d+) of (\d+) .* off by ([\d.]+) at most", said)[0]]


def _off_where_refused(record: Any) -> list[float]:
    return [
        float(each)
        for each in re.findall(r"graph of (\d+) tokens .* off by ([\d.]+) of", record["not_started"]["ours"])[0]
    ]


def _largest_graphs(again: Any, dummy: Any) -> list[float]:
    """Return the tokens of the largest CUDA graph: of 12 layers and of 36 with our experts, then with vLLM's."""
    found = []
    for side in ("ours", "vllm"):
        for record in (again, dummy):
            decided = next(each for each in record["sides"][side]["decisions"] if each["pass_name"] == "graph_capture")
            found.append(decided["params"]["max_capture_size"])
    return found


CLAIMS = [
    Table("docs/kernels.md", "| tokens, gpt-oss-120b |", "**MXFP4.**", 1, (_LAYER,), _layer),
    Table(
        "docs/kernels.md",
        "| tokens, gpt-oss-120b, Zipf |",
        "**MXFP4.**",
        1,
        (_LAYER,),
        functools.partial(_layer, routing="zipf"),
    ),
    Claim("docs/kernels.md", "level with both routings, {0.99} to {1.03} times as fast", (_LAYER,), _level),
    Claim(
        "docs/kernels.md",
        "{1.01} to {1.07} times, with Zipf routing {1.04} to {1.18}. At 1 token it is {1.31} "
        "times as fast, from 512 on\n{1.21} to {1.56}",
        (_LAYER,),
        _apart,
    ),
    Claim("docs/kernels.md", "ours is {1.33} to {1.73} times as fast as triton_kernels from 512", (_LAYER,), _in_e4m3),
    Claim(
        "docs/kernels.md",
        "ours is {1.61} times as fast at 1 token, {1.03} to {1.21} times from 2 to 256, and {1.23} to {1.48} times "
        "from 512 on ({1.33} to {1.65} with",
        (_SLICES,),
        _slices,
    ),
    Claim(
        "docs/passes/flash_dmoe.md",
        "from 32 to 256 tokens ({0.99} to {1.03} times as fast), and faster",
        (_LAYER,),
        _level,
    ),
    Claim(
        "docs/passes/flash_dmoe.md",
        "of the graph of {8} tokens were off by {0.0096} of their size",
        (f"{_LAYER}_served",),
        _off_where_refused,
    ),
    Claim(
        "docs/passes/flash_dmoe.md", "passed in {26} of {74} graphs, off by {0.01} at most", _SERVED[:1], _off_in_graphs
    ),
    Table("docs/passes/flash_dmoe.md", "| layers of gpt-oss-120b |", "Both sides were served", 2, _SERVED, _served),
    Claim("docs/passes/flash_dmoe.md", "had {502} tokens per second and {1.76} ms", (f"{_LAYER}_served",), _vllm_alone),
    Claim(
        "docs/passes/flash_dmoe.md",
        "graphs went up to {1,024} tokens (36 layers: {1,280}), with vLLM's up to {640} ({768})",
        _SERVED,
        _largest_graphs,
    ),
]
