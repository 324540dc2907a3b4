"""Reads what the records measured of served models: every load, with the layout and the model that it was of."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_optimizer.layouts.constants import CAPTURED_TOKENS
from moe_optimizer.layouts.question import STEP_TOKENS
from moe_optimizer.plan.serve_args import ServeArguments

RECORDS = Path(__file__).resolve().parents[1] / "benchmarks" / "records"
QWEN3_30B = "qwen3_moe"
SETTLED = 0.05
"""As in benchmarks/serving/closed_loop.py: what tokens/s may rise from one round to the next of a warm server."""
_LAYOUTS = {"slices": "tp2", "experts": "tp2ep", "replicas": "tp1x2"}
_SAME = {"stock vLLM": "stock", "conservative": "stock", "balanced": "flash_dmoe"}
"""Names of sides whose records do not name their passes."""
_DECIDING = ("four_bit", "fp8", "flash_dmoe", "kv_cache")
_TRIAL = "an independent trial"
_SHARED = (
    "2026-11-27_h100_x2_layouts_mixtral_tp2ep",
    "2026-11-27_h100_x2_layouts_tp2",
    "2026-11-28_h100_x2_layouts_tp2_api_servers",
    "2026-11-28_h200_front_end",
    "2026-11-28_h200_two_drafts",
)
"""Records whose hosts did other work at the same time, most of them for another server, on GPUs of its own."""
_API_SERVERS = "--api-server-count"
_CACHE_BYTES = "--kv-cache-memory-bytes"
_GRAPH_SIZES = "--cudagraph-capture-sizes"
_LONG_STEPS = {
    ("2026-11-24_h100_kv_cache_served", "aggressive"),
    ("2026-11-24_h100_kv_cache_served", "fp8+flash_dmoe"),
    ("2026-11-24_h100_profiles_served", "aggressive"),
    ("2026-11-26_h200_aggressive_served", "aggressive"),
    ("2026-11-26_h200_four_bit_kv_cache_served", "throughput +four-bit"),
}
"""Sides whose plans had 16,384 tokens in a step: their records have 1.4 or 1.8 GB of planned activations, not 0.9."""


_FEW_REQUESTS = {"2026-11-26_h200_tuned_plan_served": 64}
"""Records whose servers take so few requests at once that their graphs end below 512 tokens."""
_FOLDERS = {
    **dict.fromkeys(("q3", "qwen3", "qwen3-30b-a3b"), ""),
    **dict.fromkeys(("q3i4", "qwen3_int4", "qwen3-30b-a3b-gptq"), "INT4"),
    **dict.fromkeys(("q16", "qwen3_16", "models/qwen3_16", "q3e16-skinny", "q24", "gpt_oss_120b")),
    "gpt_oss_120b_12_layers": "MXFP4",
}
"""Folder of a side of bench_beside.py, which holds Qwen3-30B-A3B or one of `_MODELS` -> how it is stored, where not in
BF16; None: with 16 or 24 experts a layer, or gpt-oss with dummy weights, whose tokens all take the same experts.
"""
_MODELS = ("gpt_oss_120b_12_layers",)
"""Folders that are models of benchmarks/jobs.yaml."""
_HELD = {"INT4": "marlin", "MXFP4": "mxfp4"}
"""How a checkpoint is stored -> what servers of it hold."""
_ONE_LENGTH = re.compile(r"Prompts of ([\d,]+) tokens, completions of ([\d,]+)")
"""How a workload whose requests are all of one length describes itself."""
_FEWEST_TOKENS = 32
"""Chosen, of an answer. Those of a few tokens have no time per token to compare: clients that began together stay so,
all wait for one another's prompts, and what a request waits between its four tokens is where it stood in the queue.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load of one record, as it was measured."""

    record: str
    side: str
    """As the record calls it."""
    holds: str
    """The passes that decide what the server holds: a key of `predicted_loads.SIDES`."""
    layout: str
    clients: int
    requests: int
    """Of one round."""
    input_tokens: int
    output_tokens: int
    tpot_ms: float
    tokens_per_s: float | None
    gap_ms: float | None = None
    """Median time between two tokens of a request, where the record has it."""
    ttft_ms: float | None = None
    """Mean time to first token, where the record keeps how they are distributed."""
    why_no_rate: str = ""
    """Why the rate is not judged."""
    front_end_share: float | None = None
    """Share of the time that each API server was busy on a core, where the record has it."""
    shared_host: bool = False
    """Whether its host did other work at the same time (`_SHARED`)."""
    memory_share: float = 0.9
    """Of each GPU's memory, for this server."""
    cache_bytes: int | None = None
    """Of each GPU's memory, for keys and values, where the server was told; None: what the plan expects."""
    step_tokens: int = STEP_TOKENS
    """Most tokens of a step."""
    max_running: int = 1024
    """Most requests at once, at least."""
    api_servers: int | None = None
    """Of each server; None: those that vLLM starts by itself."""
    prompt_graphs: bool = False
    """Whether CUDA graphs were captured up to the most tokens of a step, so also of those that read prompts."""
    fused_router_tokens: int = 0
    """Tokens of a step up to which our expert kernels had one launch for the gate and the choice of experts."""
    model: str = QWEN3_30B
    """A published configuration (tests/data/model_configs), or a model of benchmarks/jobs.yaml."""

    @property
    def served_as(self) -> str:
        """The layout, and what is not vLLM's default in it."""
        servers = "" if self.api_servers is None else f", {self.api_servers} API servers"
        return f"{self.layout}{servers}{', graphs of prompts' * self.prompt_graphs}"


def served_loads() -> Iterator[Load]:
    """Yield every load of the served records."""
    for path in sorted(RECORDS.glob("*_h*_*.json")):
        record: Any = json.loads(path.read_text(encoding="utf-8"))
        if "layouts" in record and "workload" in record:
            lengths = (record["workload"]["input_tokens"], record["workload"]["output_tokens"])
            side, model = record.get("profile", "stock"), record.get("model", QWEN3_30B)
            holds = _SAME.get(side, side)
            for words, found in record["layouts"].items():
                layout, *own = words.split()
                given = [*found.get("serve_args", []), *own]
                about: dict[str, Any] = {
                    "model": model, "memory_share": found.get("memory_share", 0.9),
                    "shared_host": path.stem in _SHARED,
                    "api_servers": next(iter(_numbers_after(_API_SERVERS, given)), None),
                    "cache_bytes": next(iter(_numbers_after(_CACHE_BYTES, given)), None),
                    "prompt_graphs": max(_numbers_after(_GRAPH_SIZES, given), default=0) >= STEP_TOKENS,
                }  # fmt: skip
                earlier = record.get("first_start", {}).get(words, {"loads": ()})
                for load in found["loads"]:
                    starts = [load, *(each for each in earlier["loads"] if each["clients"] == load["clients"])]
                    one = _bench_load(path.stem, side, load, lengths, holds=holds, layout=layout)
                    yield dataclasses.replace(one, **(about | _mean_of(starts)))
        elif "benches" in record:
            yield from beside_loads(path.stem, record)
        elif not path.stem.endswith(("served", "layouts")):
            continue
        elif isinstance(record["sides"], list):
            for side in record["sides"]:
                holds, closed = _held(side), [load for load in side["loads"] if load["clients"] is not None]
                for load in closed:
                    lengths = _lengths(record["workload"], load)
                    yield _bench_load(path.stem, side["name"], load, lengths, holds=holds, layout="tp1")
        else:
            for name, side in record["sides"].items():
                layout = _LAYOUTS.get(name, "tp2" if "_x2_" in path.name else "tp1")
                served = "stock" if name in _LAYOUTS else name
                for clients, load in side["loads"].items():
                    yield Load(
                        record=path.stem, side=served, holds=_SAME.get(served, served), layout=layout,
                        clients=int(clients), requests=load["requests"], input_tokens=record["prompt_tokens"],
                        output_tokens=record["output_tokens"], tpot_ms=load["tpot_ms_median"],
                        tokens_per_s=load["output_tokens_per_s"], why_no_rate=_not_warm(load),
                    )  # fmt: skip


def beside_loads(stem: str, record: Any) -> list[Load]:
    """Return the loads of a record of bench_beside.py, of all benches that have them.

    Its sides are named as its caller likes. What they hold is what was decided and what they were started with.
    """
    words = [text for word, text in itertools.pairwise(record["command"]) if word == "--side"]
    folders = {name: folder for name, folder, *_ in map(shlex.split, words)}
    stored = {name: _FOLDERS[folder] for name, folder in folders.items()}
    benched: dict[tuple[str, tuple[int, int], int], list[Any]] = {}
    for bench in record["benches"]:
        lengths = _one_length(bench)
        for name, loads in ((side["name"], side["loads"]) for side in bench["sides"]):
            if lengths and stored[name] is not None and _describable(record["sides"][name]):
                for load in loads:
                    benched.setdefault((name, lengths, load["clients"]), []).append(load)
    return [
        dataclasses.replace(
            _beside_load(stem, name, found[0], lengths, stored=stored[name], side=record["sides"][name]),
            shared_host=stem in _SHARED, **_mean_of(found),
            model=folders[name] if folders[name] in _MODELS else QWEN3_30B,
        )
        for (name, lengths, _), found in sorted(benched.items(), key=lambda item: item[0])
    ]  # fmt: skip


def _beside_load(stem: str, name: str, load: Any, lengths: tuple[int, int], *, stored: str | None, side: Any) -> Load:
    arguments = ServeArguments(*side["serve_args"])
    decided = {each["pass_name"]: each for each in side["decisions"] if each["status"] == "on"}
    held = ([_HELD[stored]] if stored else []) + [each for each in _DECIDING if each in decided]
    captured = decided.get("graph_capture", {"params": {"max_capture_size": 0}})["params"]["max_capture_size"]
    one = _bench_load(
        stem, f"{name}, {stored}" if stored else name, load, lengths, holds="+".join(held) or "stock", layout="tp1"
    )
    return dataclasses.replace(
        one,
        memory_share=float(arguments.values["--gpu-memory-utilization"]),
        cache_bytes=arguments.count(_CACHE_BYTES),
        step_tokens=int(arguments.values["--max-num-batched-tokens"]),
        max_running=int(arguments.values["--max-num-seqs"]),
        # The plan captures each size of a step with prompts that would wait for its launches.
        prompt_graphs=captured > CAPTURED_TOKENS,
        # Plans had it for gpt-oss too until 2026-11-29, whose model multiplies its gate itself.
        fused_router_tokens=0
        if "flash_dmoe" not in decided or stored == "MXFP4"
        else decided["flash_dmoe"]["params"]["fused_router"],
        api_servers=arguments.count(_API_SERVERS),
    )


def _one_length(bench: Any) -> tuple[int, int] | None:
    """Return tokens of each prompt and answer; None: they differ, or answers are of a few tokens."""
    found = _ONE_LENGTH.fullmatch(bench["description"])
    prompt, answer = (int(each.replace(",", "")) for each in found.groups()) if found else (0, 0)
    return (prompt, answer) if answer >= _FEWEST_TOKENS else None


def _describable(side: Any) -> bool:
    """Whether the model can be asked about a server: not with drafts, whose acceptance no load has; nor with sizes of
    graphs that somebody chose, since it counts none for steps that read prompts, or all that would wait.
    """
    planned = [word for each in side["decisions"] for word in each["vllm_args"]]
    chosen = _GRAPH_SIZES in side["serve_args"] and _GRAPH_SIZES not in planned
    return "--speculative-config" not in side["serve_args"] and not chosen


def _held(side: Any) -> str:
    """Return what a side of a record holds, by its name or its passes."""
    name = _SAME.get(side["name"], side["name"])
    if {*name.split("+")} <= {"stock", "marlin", "fp8 again", *_DECIDING}:
        return name
    return "+".join(each for each in _DECIDING if each in side["passes"]) or "stock"


def _bench_load(record: str, side: str, load: Any, lengths: tuple[int, int], *, holds: str, layout: str) -> Load:
    return Load(
        record=record, side=side, holds=holds, layout=layout, clients=load["clients"],
        requests=load["completed"] // load["rounds"], input_tokens=lengths[0], output_tokens=lengths[1],
        tpot_ms=load["tpot_ms"]["median"], tokens_per_s=load["output_tokens_per_s"],
        step_tokens=16_384 if (record, side) in _LONG_STEPS else STEP_TOKENS,
        max_running=_FEW_REQUESTS.get(record, 1024), ttft_ms=_mean_ttft_ms(load),
        gap_ms=load.get("itl_ms", {}).get("median"), front_end_share=(load.get("api_servers") or {}).get("core_share"),
    )  # fmt: skip


def _numbers_after(flag: str, words: list[str]) -> list[int]:
    """Return the numbers that follow a flag among arguments; [] without it."""
    after = words[words.index(flag) + 1 :] if flag in words else []
    return [int(word) for word in itertools.takewhile(str.isdecimal, after)]


def _mean_of(starts: list[Any]) -> dict[str, Any]:
    """Return what one load took in all rounds of all starts that measured it."""
    rounds = sum(each["rounds"] for each in starts)
    first_tokens = [(each["rounds"], found) for each in starts if (found := _mean_ttft_ms(each)) is not None]
    counted = sum(count for count, _ in first_tokens)
    return {
        "tpot_ms": sum(each["rounds"] * each["tpot_ms"]["median"] for each in starts) / rounds,
        "tokens_per_s": rounds / sum(each["rounds"] / each["output_tokens_per_s"] for each in starts),
        "ttft_ms": sum(count * found for count, found in first_tokens) / counted if counted else None,
    }


def _mean_ttft_ms(load: Any) -> float | None:
    """Return the mean of the quantiles that a record of `moe-optimizer bench` has, from the least to the most."""
    curve = load.get("ttft_ms", {}).get("curve")
    return sum(curve) / len(curve) if curve else None


def _lengths(workload: Any, load: Any) -> tuple[int, int]:
    """Return tokens of a prompt and of an answer, on average; a record of `moe-optimizer bench` names its workload."""
    if isinstance(workload, dict):
        return workload["prompt_tokens"], workload["output_tokens"]
    output = load["output_tokens_per_s"] / load["requests_per_s"]
    return round(load["total_tokens_per_s"] / load["requests_per_s"] - output), round(output)


def _not_warm(load: Any) -> str:
    """Return why the rate of a loop may be one of compilation too."""
    before = load.get("uncounted_tokens_per_s")
    if before is None:
        return "no round before it is recorded"
    return "the round before it was faster" if before[-1] > load["output_tokens_per_s"] * (1 + SETTLED) else ""


TRIAL = [
    Load(
        record=_TRIAL, side=side, holds=side, layout="tp1", clients=clients, requests=clients, input_tokens=512,
        output_tokens=128, tpot_ms=tpot_ms, tokens_per_s=None, why_no_rate="not published",
    )
    for side, found in {
        "stock": {1: 4.69, 16: 16.51, 64: 26.06, 256: 40.03},
        "marlin": {1: 4.39, 16: 8.19, 64: 11.61},
    }.items()
    for clients, tpot_ms in found.items()
]  # fmt: skip
"""What others measured on one H100."""
