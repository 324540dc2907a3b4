"""Compares the step model with every served record, and writes docs/model_error.md.

    python scripts/model_error.py [--check] [--max-model-error SHARE]

--check only tells whether the page is up to date. The rate of a run is all its tokens over its whole time, as the
benchmarks count it, so the last wave of requests counts, which leaves places empty; predicted rates are of that too.
A rate is judged where the record shows that the server was warm: rounds of the same size before it, of which the last
was no faster than `SETTLED` allows, or the warm-up of moe-optimizer bench. Times to first token are not judged.
--max-model-error 0.1 fails where predictions are further off on average: of the time per output token, or of what a
pass gains in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_optimizer.costs.memory import MemoryRequest  # noqa: E402
from moe_optimizer.inspection.hardware_catalog import load_catalog_entry  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import read_tables, shipped_dir  # noqa: E402
from moe_optimizer.inspection.model_inspector import ModelInspector  # noqa: E402
from moe_optimizer.layouts.question import STEP_TOKENS, LayoutQuestion  # noqa: E402
from moe_optimizer.layouts.serving import Prediction, memory_of, predict  # noqa: E402
from moe_optimizer.specs.kernel_speeds import SpeedTables  # noqa: E402
from moe_optimizer.specs.layout import parse_layout  # noqa: E402
from moe_optimizer.specs.model import ModelSpec  # noqa: E402
from tests.builders import qwen3_30b_a3b  # noqa: E402

PAGE = ROOT / "docs" / "model_error.md"
RECORDS = ROOT / "benchmarks" / "records"
_FP8 = {"expert_bits": 8, "linear_bits": 8, "weights": "fp8_block"}
SIDES = {
    "stock": {},
    "flash_dmoe": {"our_kernels": True},
    "fp8": _FP8,
    "fp8 again": _FP8,
    "marlin": {"expert_bits": 4.125, "linear_bits": 4.125, "weights": ""},
    "four_bit+flash_dmoe": {"expert_bits": 4.25, "linear_bits": 16, "weights": "mxfp4", "our_kernels": True},
    "four_bit+fp8+flash_dmoe": {"expert_bits": 4.25, "linear_bits": 8, "weights": "mxfp4", "our_kernels": True},
    "fp8+flash_dmoe": {**_FP8, "our_kernels": True},
    "four_bit+fp8+flash_dmoe+kv_cache": {
        "expert_bits": 4.25, "linear_bits": 8, "weights": "mxfp4", "our_kernels": True, "kv_bits": 8,
    },
    "fp8+flash_dmoe+kv_cache": {**_FP8, "our_kernels": True, "kv_bits": 8},
}  # fmt: skip
"""What a server holds, as the model is asked, by the passes that decide it."""
_SAME = {"stock vLLM": "stock", "balanced": "flash_dmoe"}
"""Of sides whose records do not name their passes."""
QWEN3_30B = "qwen3_moe"
_TRIAL = "an independent trial"
LAYOUTS = {"slices": "tp2", "experts": "tp2ep", "replicas": "tp1x2"}
FITTED = {
    ("2026-11-22_h100_served", "stock", 1): "REQUEST_US",
}
"""Cases that a constant was read from; the errors of all others are of predictions."""
SETTLED = 0.05
"""As in benchmarks/serving/closed_loop.py: what tokens/s may rise from one round to the next of a warm server."""
_EXPERTS, _REPLICAS = "parallelism: experts instead of slices", "replicas instead of slices"
PAIRS = {
    "stock": {
        "flash_dmoe": "flash_dmoe",
        "fp8": "fp8",
        "fp8+flash_dmoe": "fp8 and flash_dmoe",
        "fp8+flash_dmoe+kv_cache": "fp8, flash_dmoe and kv_cache",
    },
    "flash_dmoe": {"fp8+flash_dmoe": "fp8"},
    "fp8": {"fp8+flash_dmoe": "flash_dmoe"},
    "fp8+flash_dmoe": {"fp8+flash_dmoe+kv_cache": "kv_cache", "four_bit+flash_dmoe": "four_bit instead of fp8"},
    "slices": {"experts": _EXPERTS, "replicas": _REPLICAS},
    "tp2": {"tp2ep": _EXPERTS, "tp1x2": _REPLICAS, "tp1dp2ep": "parallelism: copies with experts instead of slices"},
}
"""What a server holds without a pass -> what servers of the same record hold with it -> the pass. Other passes change
nothing that the model holds.
"""
_HEAD = """# How wrong the predictions are

Written by `scripts/model_error.py` from the records named below: random weights (so even routing), of Qwen3-30B-A3B
where the record's name says no other model, vLLM 0.26, closed loops. Error: predicted over measured, less one. A case
in italics gave a constant of the model and is left out of the means. How a prediction is made: [layouts](layouts.md).

A rate is all tokens of a run over its whole time, as measured: where the clients do not all find room, the last wave of
requests leaves places empty, and the prediction counts that too. A rate is judged only where the record shows that the
server was warm, because compilation would count as serving: `moe-optimizer bench` sends every load once before it
counts; of other loops the last round before must be on record, and at most 5 % faster. The independent trial published
times per token only, and not how many requests it sent.

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load of one record, as it was measured."""

    record: str
    side: str
    holds: str
    """Key of `SIDES`, or a layout."""
    layout: str
    clients: int
    requests: int
    """Of one round."""
    input_tokens: int
    output_tokens: int
    tpot_ms: float
    tokens_per_s: float | None
    why_no_rate: str = ""
    """Why the rate is not judged."""
    model: str = QWEN3_30B
    """A published configuration (tests/data/model_configs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCase:
    """What one pass gains in time per output token under one load: above 1 is better."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One load of one record beside its prediction."""

    load: Load
    prediction: Prediction
    rate: float
    """Predicted tokens/s of the run as it was, from its first request to its last."""

    @property
    def fitted(self) -> bool:
        """Whether a constant was read from it."""
        return (self.load.record, self.load.side, self.load.clients) in FITTED

    @property
    def tpot_error(self) -> float:
        """Of the time per output token."""
        return self.prediction.tpot_ms / self.load.tpot_ms - 1

    @property
    def rate_error(self) -> float | None:
        """Of the tokens a second; None: not judged."""
        measured = None if self.load.why_no_rate else self.load.tokens_per_s
        return None if measured is None else self.rate / measured - 1


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--max-model-error", type=float, metavar="SHARE")
    options = parser.parse_args(arguments)
    found = list(cases())
    text = page(found)
    if options.check:
        same = PAGE.read_text(encoding="utf-8") == text
        print("up to date" if same else "run scripts/model_error.py")
        if not same:
            return 1
    else:
        PAGE.write_text(text, encoding="utf-8")
    too_far = [] if options.max_model_error is None else above(found, options.max_model_error)
    for line in too_far:
        print(line)
    return 1 if too_far else 0


def above(found: list[Case], most: float) -> list[str]:
    """Return what is predicted worse on average than a share of the measured value."""
    errors = {"time per output token": [case.tpot_error for case in found if not case.fitted]}
    errors |= {f"gain of {name}": [case.error for case in group] for name, group in by_pass(found).items()}
    means = {what: statistics.mean(map(abs, each)) for what, each in errors.items()}
    return [
        f"{what}: mean error {mean:.1%} of {len(errors[what])} cases, expected at most {most:.1%}"
        for what, mean in means.items()
        if mean > most
    ]


def by_pass(found: list[Case]) -> dict[str, list[PassCase]]:
    """Return what each pass was measured and predicted to gain, wherever a record has the side without it too."""
    sides = {(case.load.record, case.load.holds, case.load.clients): case for case in found}
    groups: dict[str, list[PassCase]] = {}
    for (record, side, clients), base in sides.items():
        for other, name in PAIRS.get(side, {}).items():
            case = sides.get((record, other, clients))
            if case is not None:
                predicted = base.prediction.tpot_ms / case.prediction.tpot_ms
                one = PassCase(name=name, measured=base.load.tpot_ms / case.load.tpot_ms, predicted=predicted)
                groups.setdefault(name, []).append(one)
    return dict(sorted(groups.items()))


def cases() -> Iterator[Case]:
    """Yield every load of the served records, each with its prediction."""
    yield from map(predicted, [*served_loads(), *TRIAL])


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


def served_loads() -> Iterator[Load]:
    """Yield every load of the served records."""
    for path in sorted(RECORDS.glob("*_h*_*.json")):
        record: Any = json.loads(path.read_text(encoding="utf-8"))
        if "layouts" in record and "workload" in record:
            lengths = (record["workload"]["input_tokens"], record["workload"]["output_tokens"])
            for layout, found in record["layouts"].items():
                loads = (
                    _bench_load(path.stem, layout, load, lengths, holds=layout, layout=layout)
                    for load in found["loads"]
                )
                yield from (dataclasses.replace(load, model=record.get("model", QWEN3_30B)) for load in loads)
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
                layout = LAYOUTS.get(name, "tp2" if "_x2_" in path.name else "tp1")
                for clients, load in side["loads"].items():
                    yield Load(
                        record=path.stem, side=name, holds=name, layout=layout, clients=int(clients),
                        requests=load["requests"], input_tokens=record["prompt_tokens"],
                        output_tokens=record["output_tokens"], tpot_ms=load["tpot_ms_median"],
                        tokens_per_s=load["output_tokens_per_s"], why_no_rate=_not_warm(load),
                    )  # fmt: skip


def _held(side: Any) -> str:
    """Return which of `SIDES` a side of a record is."""
    name = _SAME.get(side["name"], side["name"])
    if name in SIDES:
        return name
    return "+".join(each for each in ("four_bit", "fp8", "flash_dmoe", "kv_cache") if each in side["passes"]) or "stock"


def _bench_load(record: str, side: str, load: Any, lengths: tuple[int, int], *, holds: str, layout: str) -> Load:
    return Load(
        record=record, side=side, holds=holds, layout=layout, clients=load["clients"],
        requests=load["completed"] // load["rounds"], input_tokens=lengths[0], output_tokens=lengths[1],
        tpot_ms=load["tpot_ms"]["median"], tokens_per_s=load["output_tokens_per_s"],
    )  # fmt: skip


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


def predicted(load: Load) -> Case:
    """Return a load beside its prediction."""
    question, layout = _question(load), parse_layout(load.layout)
    memory = memory_of(question, layout)
    prediction = predict(question, layout, memory)

    def wave_s(clients: int) -> float:
        served = predict(dataclasses.replace(question, clients=clients), layout, memory)
        return clients * load.output_tokens / served.tokens_per_s

    places = min(load.clients, prediction.running * layout.replicas * layout.data_parallel_size)
    waves, rest = divmod(load.requests, places)
    wall_s = waves * wave_s(places) + (wave_s(rest) if rest else 0.0)
    return Case(load=load, prediction=prediction, rate=load.requests * load.output_tokens / wall_s)


def _question(load: Load) -> LayoutQuestion:
    gpu = load_catalog_entry("h200" if "_h200_" in load.record else "h100_sxm").gpu
    fields: dict[str, Any] = {"expert_bits": 16, "linear_bits": 16, "weights": "bf16", **SIDES.get(load.holds, {})}
    kv_bits = fields.pop("kv_bits", 16)
    memory = MemoryRequest(
        model=_model(load.model), device_bytes=int(gpu.memory.value), num_devices=1, gpu_memory_utilization=0.9,
        max_num_batched_tokens=STEP_TOKENS, max_num_seqs=256, max_model_len=load.input_tokens + load.output_tokens,
        expert_bits=fields["expert_bits"], linear_bits=fields["linear_bits"], kv_bits=kv_bits,
    )  # fmt: skip
    files = sorted(shipped_dir().glob("*.json"))
    return LayoutQuestion(
        memory=memory, gpu=gpu, gpus_per_machine=parse_layout(load.layout).num_devices, clients=load.clients,
        input_tokens=load.input_tokens, output_tokens=load.output_tokens, max_running=1024, even_routing=True,
        speeds=SpeedTables(tables=tuple(each for path in files for each in read_tables(path))), **fields,
    )  # fmt: skip


@cache
def _model(name: str) -> ModelSpec:
    """Return a published model as it is inspected."""
    if name == QWEN3_30B:
        return qwen3_30b_a3b()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "tests" / "data" / "model_configs" / f"{name}.json", Path(folder) / "config.json")
        return ModelInspector().inspect(Path(folder))


def page(found: list[Case]) -> str:
    """Return the page's text."""
    held_out = [case for case in found if not case.fitted]
    errors = {
        "TPOT": [(case.tpot_error, case) for case in held_out],
        "tokens/s": [(case.rate_error, case) for case in held_out if case.rate_error is not None],
    }
    lines = ["| | TPOT | tokens/s |", "|---|--:|--:|"]
    lines.append(f"| cases | {' | '.join(str(len(each)) for each in errors.values())} |")
    for words, summed in (("mean error", statistics.mean), ("median error", statistics.median), ("largest error", max)):
        figures = [summed([abs(error) for error, _ in each]) for each in errors.values()]
        lines.append(f"| {words} | {' | '.join(f'{figure:.1%}' for figure in figures)} |")
    lines += ["", *_pass_table(found), "", "The worst cases:", ""]
    for what, pairs in errors.items():
        worst = sorted(pairs, key=lambda pair: -abs(pair[0]))[:3]
        lines += [
            f"- {what}: {case.load.side}, {case.load.clients} clients, {error:+.0%} (`{case.load.record}`)"
            for error, case in worst
        ]
    lines += [
        "",
        "| record | side | layout | clients | TPOT ms, measured | predicted | error "
        "| tokens/s, measured | predicted | error |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [_row(case) for case in found]
    return _HEAD + "\n".join(lines) + "\n"


def _row(case: Case) -> str:
    load, mark = case.load, "*" if case.fitted else ""
    rates = "| |" if load.tokens_per_s is None else f"| {load.tokens_per_s:,.0f} | {case.rate:,.0f}"
    error = load.why_no_rate if case.rate_error is None else f"{case.rate_error:+.0%}"
    return (
        f"| {load.record} | {load.side} | {load.layout} | {mark}{load.clients}{mark} "
        f"| {load.tpot_ms:.2f} | {case.prediction.tpot_ms:.2f} | {case.tpot_error:+.0%} "
        f"{rates} | {error} |"
    )


def _pass_table(found: list[Case]) -> list[str]:
    lines = [
        "What each pass gains in TPOT, where a record has servers with and without it, at the same number of clients "
        "(above 1 is faster). The other passes are in no pair of servers; the plan says why it models no gain of them.",
        "",
        "| pass | cases | measured | predicted | mean error | largest error |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, group in by_pass(found).items():
        measured, predicted = ([getattr(case, key) for case in group] for key in ("measured", "predicted"))
        errors = [abs(case.error) for case in group]
        lines.append(
            f"| {name} | {len(group)} | {min(measured):.2f}x to {max(measured):.2f}x "
            f"| {min(predicted):.2f}x to {max(predicted):.2f}x | {statistics.mean(errors):.1%} | {max(errors):.1%} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
