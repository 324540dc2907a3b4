"""Makes the report: one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from moe_optimizer import __version__
from moe_optimizer.costs.expert_imbalance import load_report
from moe_optimizer.errors import UnsupportedError
from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds
from moe_optimizer.measure.bench.memory_parts import memory_parts
from moe_optimizer.measure.bench.result import BenchResult, MemoryPart
from moe_optimizer.measure.bench.side import STOCK
from moe_optimizer.measure.bench.statistics import ratio_in_words
from moe_optimizer.measure.quality.intervals import Estimate
from moe_optimizer.measure.quality.table import SAYS_LITTLE, failure_text, in_words
from moe_optimizer.measure.report.heatmap import heatmap
from moe_optimizer.measure.report.inputs import Inputs, Run
from moe_optimizer.measure.report.ledger_figure import ledger_figure
from moe_optimizer.measure.report.proofs import workers
from moe_optimizer.measure.report.roofline_figure import roofline
from moe_optimizer.measure.report.speed_figures import SPEEDS, distribution_figures, interval, load_name, speed_figures
from moe_optimizer.measure.report.svg import Picture, style_sheet
from moe_optimizer.plan.decision import Decision, Status
from moe_optimizer.plan.explain import render_commands
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.verdict import model_holders
from moe_optimizer.specs.kernel_speeds import KernelSpeeds
from moe_optimizer.specs.quantity import bytes_in_words

_FOLDER = Path(__file__).parent
_MOST_ROOFLINES = 4
_STOCK_IN_WORDS = "stock vLLM"
_QUALITY = {
    "kl_mean": "KL divergence of next-token distributions, mean",
    "kl_p99": "KL divergence of next-token distributions, p99",
    "top1_agreement": "top-1 agreement",
    "perplexity_ratio": "perplexity ratio",
    "greedy_match_tokens": "tokens until greedy outputs differ",
}
"""Field of a QualityResult -> its name."""


def render_page(inputs: Inputs) -> str:
    """Return the whole page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": bytes_in_words,
        "number": _number,
        "ratio": ratio_in_words,
        "gain": _gain,
        "shell": shlex.join,
        "estimate": _estimate,
        "failure": failure_text,
    }
    plan, bench = inputs.plan, None if inputs.bench is None else _in_words(inputs.bench)
    return environment.get_template("page.html.j2").render(
        style=Markup(style_sheet() + (_FOLDER / "page.css").read_text(encoding="utf-8")),
        title=_title(inputs, bench),
        inputs=inputs,
        plan=plan,
        bench=bench,
        speed_figures=[] if bench is None else _markup(speed_figures(bench)),
        distributions=[] if bench is None else _markup(distribution_figures(bench)),
        speeds=SPEEDS,
        interval=interval,
        load_name=load_name,
        decided=_decided,
        memory_found=lambda run: memory_parts(run.plan.memory, model_holders(run.proofs)),
        memory_rows=_memory_rows,
        runs=[(run, workers(run)) for run in _named_runs(inputs, bench)],
        heatmap=_heatmap(inputs),
        load=None if inputs.load is None else load_report(inputs.load).mean,
        rooflines=[] if plan is None else _rooflines(plan),
        ledgers=[(_markup([ledger_figure(stock, ours)])[0], stock, ours) for stock, ours in inputs.ledgers],
        quality=inputs.quality,
        quality_names=_QUALITY,
        says_little=SAYS_LITTLE,
        reference=_STOCK_IN_WORDS if inputs.quality and inputs.quality.reference == STOCK else None,
        environment=_environment(inputs),
        commands="" if plan is None else render_commands(plan),
        version=__version__,
    )


def _in_words(bench: BenchResult) -> BenchResult:
    """Call the side that is vLLM alone by its full name."""
    sides = [dataclasses.replace(side, name=_STOCK_IN_WORDS) if side.name == STOCK else side for side in bench.sides]
    return dataclasses.replace(bench, sides=tuple(sides))


def _named_runs(inputs: Inputs, bench: BenchResult | None) -> list[Run]:
    """Return the runs by the names of their sides; vLLM alone ran by no decision, and has nothing to show here."""
    sides = {side.plan_digest: side.name for side in bench.sides} if bench is not None else {}
    runs = [dataclasses.replace(run, title=sides.get(run.plan.digest, run.title)) for run in inputs.runs]
    return [run for run in runs if run.title != _STOCK_IN_WORDS]


def _markup(figures: list[Picture]) -> list[Markup]:
    # Every text in a picture was escaped by the XML writer.
    return [Markup(figure.markup()) for figure in figures]


def _title(inputs: Inputs, bench: BenchResult | None) -> str:
    if bench is not None:
        return f"{Path(bench.environment['model']).name}: " + " against ".join(side.name for side in bench.sides)
    if inputs.plan is not None:
        return f"{inputs.plan.model.name}: {inputs.plan.profile_name}"
    if inputs.load is not None:
        return Path(inputs.load.model).name
    return "Decode steps" if inputs.ledgers else "Quality"


def _memory_rows(plan: MemoryPlan, found: Sequence[MemoryPart]) -> list[tuple[str, int]]:
    """Return each part with the bytes that are planned for it; parts that workers tell under another name too."""
    rows = {
        "weights": plan.weight_bytes,
        "activations": plan.activation_bytes,
        "workspace": plan.workspace_bytes,
        **{each.part: each.planned_bytes for each in found},
        "cache": plan.kv_cache_bytes,
        "unused": plan.unused_bytes,
        "budget": plan.budget_bytes,
        "device": plan.total_bytes,
    }
    return list(rows.items())


def _heatmap(inputs: Inputs) -> Markup | None:
    if inputs.load is None:
        return None
    report = load_report(inputs.load)
    return None if report.mean is None else _markup([heatmap(inputs.load, report)])[0]


def _rooflines(plan: Plan) -> list[tuple[KernelSpeeds, Markup]]:
    """Return a roofline for each kind of weights that was measured on the plan's GPU, for the plan's layers."""
    gpu = plan.hardware.gpu
    if gpu is None or not plan.num_gpus or not plan.model.is_moe:
        return []
    found: dict[str, KernelSpeeds] = {}
    for table in read_kernel_speeds().tables:
        shape = table.shape
        wanted = (plan.model.expert_hidden_size, plan.model.moe_intermediate_size, plan.model.num_experts)
        if table.device == gpu.name and (shape.hidden_size, shape.intermediate_size, shape.num_experts) == wanted:
            found[table.weights] = table
    try:
        return [(table, _markup([roofline(table, gpu)])[0]) for table in list(found.values())[:_MOST_ROOFLINES]]
    except UnsupportedError:
        return []


def _environment(inputs: Inputs) -> Mapping[str, str]:
    """Return what the numbers depend on."""
    found: dict[str, str] = {}
    if inputs.plan is not None:
        hardware = inputs.plan.hardware
        device = hardware.gpu.name if hardware.gpu and inputs.plan.num_gpus else hardware.cpu and hardware.cpu.name
        found = {
            "model": inputs.plan.model.name,
            "device": str(device),
            "gpus": str(inputs.plan.num_gpus),
            "driver": hardware.driver_version or "",
            "cuda": hardware.cuda_version or "",
            "vllm": inputs.plan.vllm_version or "",
            "plan": inputs.plan.digest,
        }
    proven = [proof.versions for run in inputs.runs for proof in run.proofs if proof.passes]
    found |= {name.replace("_", "-"): version for name, version in proven[0].items()} if proven else {}
    found |= dict(inputs.bench.environment) if inputs.bench is not None else {}
    return {name: value for name, value in found.items() if value}


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _estimate(found: Estimate) -> str:
    return in_words(found, "{:.4g}")


def _decided(plan: Plan) -> list[Decision]:
    """Return the decisions, those that change something first."""
    order = list(Status)
    return sorted(plan.decisions, key=lambda decision: (decision.status is Status.OFF, order.index(decision.status)))


def _gain(decision: Decision) -> str:
    assert decision.gain is not None
    ratio = decision.gain.ratio
    return f"{ratio.value:.2f}x {decision.gain.metric} ({ratio.source.name.lower()})"
