"""Compares the step model with every served record, and writes docs/model_error.md.

    python scripts/model_error.py [--check] [--max-model-error SHARE]

--check only tells whether the page is up to date. --max-model-error 0.1 fails where predictions are further off on
average: of the time per output token, or of what a pass gains in it. Times to first token are shown and not judged: the
first requests of the records of 2026-11-21 still compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_optimizer.costs.memory import MemoryRequest  # noqa: E402
from moe_optimizer.inspection.hardware_catalog import load_catalog_entry  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import read_tables, shipped_dir  # noqa: E402
from moe_optimizer.layouts.question import STEP_TOKENS, LayoutQuestion  # noqa: E402
from moe_optimizer.layouts.serving import Prediction, memory_of, predict  # noqa: E402
from moe_optimizer.specs.kernel_speeds import SpeedTables  # noqa: E402
from moe_optimizer.specs.layout import parse_layout  # noqa: E402
from tests.builders import qwen3_30b_a3b  # noqa: E402

PAGE = ROOT / "docs" / "model_error.md"
RECORDS = ROOT / "benchmarks" / "records"
SIDES = {
    "stock": {},
    "balanced": {"our_kernels": True},
    "flash_dmoe": {"our_kernels": True},
    "fp8": {"expert_bits": 8, "linear_bits": 8, "weights": "fp8_block"},
    "fp8+flash_dmoe": {"expert_bits": 8, "linear_bits": 8, "weights": "fp8_block", "our_kernels": True},
}
LAYOUTS = {"slices": "tp2", "experts": "tp2ep", "replicas": "tp1x2"}
FITTED = {
    ("2026-11-22_h100_served", "stock", 1): "REQUEST_US",
    ("2026-11-21_h200_served", "fp8", 1): "QUANTISE_CALL_US",
    ("2026-11-21_h200_layouts", "slices", 1): "all_reduce_latency",
}
"""Cases that a constant was read from; the errors of all others are of predictions."""
PAIRS = {
    "stock": {
        "flash_dmoe": "flash_dmoe",
        "fp8": "fp8",
        "balanced": "flash_dmoe",
        "fp8+flash_dmoe": "fp8 and flash_dmoe",
    },
    "flash_dmoe": {"fp8+flash_dmoe": "fp8"},
    "fp8": {"fp8+flash_dmoe": "flash_dmoe"},
    "slices": {"experts": "parallelism: experts instead of slices", "replicas": "replicas instead of slices"},
}
"""Side without a pass -> sides of the same record with it -> the pass. The passes that `balanced` adds beside our
kernel change nothing that the model holds.
"""
_HEAD = """# How wrong the predictions are

Written by `scripts/model_error.py` from the records named below: Qwen3-30B-A3B with random weights (so even routing),
vLLM 0.26, closed loops. Error: predicted over measured, less one. A case in italics gave a constant of the model and is
left out of the means. How a prediction is made: [layouts](layouts.md).

"""


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

    record: str
    side: str
    clients: int
    prediction: Prediction
    tpot_ms: float
    tokens_per_s: float

    @property
    def fitted(self) -> bool:
        """Whether a constant was read from it."""
        return (self.record, self.side, self.clients) in FITTED

    @property
    def tpot_error(self) -> float:
        """Of the time per output token."""
        return self.prediction.tpot_ms / self.tpot_ms - 1

    @property
    def rate_error(self) -> float:
        """Of the tokens a second."""
        return self.prediction.tokens_per_s / self.tokens_per_s - 1


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
    sides = {(case.record, case.side, case.clients): case for case in found}
    groups: dict[str, list[PassCase]] = {}
    for (record, side, clients), base in sides.items():
        for other, name in PAIRS.get(side.removesuffix(" vLLM"), {}).items():
            case = sides.get((record, other, clients))
            if case is not None:
                predicted = base.prediction.tpot_ms / case.prediction.tpot_ms
                one = PassCase(name=name, measured=base.tpot_ms / case.tpot_ms, predicted=predicted)
                groups.setdefault(name, []).append(one)
    return dict(sorted(groups.items()))


def cases() -> Iterator[Case]:
    """Yield every load of the served records."""
    for path in sorted(RECORDS.glob("*_h*_*.json")):
        record: Any = json.loads(path.read_text(encoding="utf-8"))
        hardware = "h200" if "_h200_" in path.name else "h100_sxm"
        if isinstance(record.get("sides"), list) and "workload" in record and path.stem.endswith("served"):
            workload = record["workload"]
            for side in record["sides"]:
                for load in side["loads"]:
                    yield _case(path.stem, side["name"], "tp1", hardware, load["clients"],
                                (workload["prompt_tokens"], workload["output_tokens"]),
                                (load["tpot_ms"]["median"], load["output_tokens_per_s"]))  # fmt: skip
        elif path.stem.endswith(("served", "layouts")) and "sides" in record:
            lengths = (record["prompt_tokens"], record["output_tokens"])
            for name, side in record["sides"].items():
                layout = LAYOUTS.get(name, "tp2" if "_x2_" in path.name else "tp1")
                for clients, load in side["loads"].items():
                    measured = (load["tpot_ms_median"], load["output_tokens_per_s"])
                    yield _case(path.stem, name, layout, hardware, int(clients), lengths, measured)
        elif "layouts" in record:
            lengths = (record["workload"]["input_tokens"], record["workload"]["output_tokens"])
            for layout, found in record["layouts"].items():
                for load in found["loads"]:
                    measured = (load["tpot_ms"]["median"], load["output_tokens_per_s"])
                    yield _case(path.stem, layout, layout, hardware, load["clients"], lengths, measured)


def _case(  # noqa: PLR0917 - the columns of a row
    record: str, side: str, layout: str, hardware: str, clients: int, lengths: tuple[int, int],
    measured: tuple[float, float],
) -> Case:  # fmt: skip
    gpu, shape = load_catalog_entry(hardware).gpu, parse_layout(layout)
    memory = MemoryRequest(
        model=qwen3_30b_a3b(), device_bytes=int(gpu.memory.value), num_devices=1, gpu_memory_utilization=0.9,
        max_num_batched_tokens=STEP_TOKENS, max_num_seqs=256, max_model_len=sum(lengths),
    )  # fmt: skip
    fields: dict[str, Any] = {"expert_bits": 16, "linear_bits": 16, "weights": "bf16", **SIDES.get(side, {})}
    files = sorted(shipped_dir().glob("*.json"))
    tables = SpeedTables(tables=tuple(each for path in files for each in read_tables(path)))
    question = LayoutQuestion(
        memory=memory, gpu=gpu, gpus_per_machine=shape.num_devices, clients=clients, input_tokens=lengths[0],
        output_tokens=lengths[1], max_running=1024, speeds=tables, even_routing=True, **fields,
    )  # fmt: skip
    prediction = predict(question, shape, memory_of(question, shape))
    return Case(record=record, side=side, clients=clients, prediction=prediction,
                tpot_ms=measured[0], tokens_per_s=measured[1])  # fmt: skip


def page(found: list[Case]) -> str:
    """Return the page's text."""
    held_out = [case for case in found if not case.fitted]
    lines = ["| | TPOT | tokens/s |", "|---|--:|--:|"]
    for words, summed in (("mean error", statistics.mean), ("median error", statistics.median), ("largest error", max)):
        tpot = summed([abs(case.tpot_error) for case in held_out])
        rate = summed([abs(case.rate_error) for case in held_out])
        lines.append(f"| {words} of {len(held_out)} cases | {tpot:.1%} | {rate:.1%} |")
    lines += ["", *_pass_table(found), "", "The worst cases:", ""]
    for name in ("tpot_error", "rate_error"):
        worst = sorted(held_out, key=lambda case: -abs(getattr(case, name)))[:3]
        what = "TPOT" if name == "tpot_error" else "tokens/s"
        lines += [
            f"- {what}: {case.side}, {case.clients} clients, {getattr(case, name):+.0%} (`{case.record}`)"
            for case in worst
        ]
    lines += [
        "",
        "The rates of short loops include their beginning and end, where fewer requests run, and what was compiled "
        "meanwhile: the first tokens of the worst case took 3.1 s. The predictions do not.",
        "",
        "| record | side | layout | clients | TPOT ms, measured | predicted | error "
        "| tokens/s, measured | predicted | error |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for case in found:
        mark = "*" if case.fitted else ""
        lines.append(
            f"| {case.record} | {case.side} | {case.prediction.layout.name} | {mark}{case.clients}{mark} "
            f"| {case.tpot_ms:.2f} | {case.prediction.tpot_ms:.2f} | {case.tpot_error:+.0%} "
            f"| {case.tokens_per_s:,.0f} | {case.prediction.tokens_per_s:,.0f} | {case.rate_error:+.0%} |"
        )
    return _HEAD + "\n".join(lines) + "\n"


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
