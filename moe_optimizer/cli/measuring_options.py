"""Declares the options of the commands that measure, and of those that show what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import typer

from moe_optimizer.cli.option_fields import DECLARATION, argument, choice, flag, option
from moe_optimizer.cli.option_values import seconds, whole_number
from moe_optimizer.cli.options import GRANULARITIES, CommonOptions, ModelOptions, PlanOptions, ServersOptions

ONLY_TRITON = "triton"
DEFAULT_WORKLOAD = "chat"


def _workloads() -> Iterable[str]:
    from moe_optimizer.measure.bench.workload import workload_names

    return workload_names()


@dataclass(frozen=True, kw_only=True)
class TrafficOptions(ServersOptions):
    """Options of a command that sends a workload to the servers."""

    workload: str = option(
        "--workload",
        "NAME|FILE",
        f"Of configs/workloads, or a YAML file, or a trace (.jsonl).  [default: {DEFAULT_WORKLOAD}]",
        values=_workloads,
        default=DEFAULT_WORKLOAD,
    )
    clients: str | None = option("--clients", "N,N,...", "Clients of the closed loop, instead of the workload's.")
    rates: str | None = option("--rates", "X,X,...", "Requests per second of an open loop, instead of the workload's.")
    requests_per_client: int | None = option(
        "--requests-per-client", "N", "In each round, instead of the workload's.", whole_number(1, 65_536)
    )


@dataclass(frozen=True, kw_only=True)
class BenchOptions(TrafficOptions):
    """Options of `moe-optimizer bench`."""

    plan: str | None = option("--plan", "FILE", "Serve this plan (plan.json of a run) instead of a profile's.")
    against: str | None = option(
        "--against", "stock|PROFILE|FILE|URL", "What to compare with; '': nothing.  [default: stock]"
    )
    repetitions: int | None = option(
        "--repetitions", "N", "Rounds of each side; the more, the narrower.  [default: 5]", whole_number(2, 1000)
    )
    ttft: float | None = option("--ttft", "MS", "Count requests within this time to the first token.", seconds)
    tpot: float | None = option("--tpot", "MS", "Count requests within this time per output token.", seconds)
    tokenizer: str | None = option("--tokenizer", "DIR", "Where prompts come from.  [default: the model]")
    run_dir: str | None = option("--run-dir", "DIR", "Folder for samples and logs.  [default: a new one in runs/]")
    resume: bool = flag("--resume", "Go on with the run in --run-dir, or with the newest in runs/.")
    html: str | None = option("--html", "FILE", "Also write a report: one file, which needs no network.")
    ablate: bool = flag("--ablate", "With --engine embedded: what each of its optimizations is worth.")


@dataclass(frozen=True, kw_only=True)
class QualityOptions(ServersOptions):
    """Options of `moe-optimizer quality`."""

    plan: str | None = option("--plan", "FILE", "Judge this plan (plan.json of a run) instead of a profile's.")
    against: str | None = option(
        "--against",
        "stock|embedded|URL|...",
        "The reference: stock vLLM, the embedded engine in float32, a running server, a profile or a plan's file.  "
        "[default: stock]",
    )
    per_pass: bool = flag("--per-pass", "Measure each pass alone too, also where the plan keeps every threshold.")
    data: str | None = option("--data", "FILE", "UTF-8 text to compare on.  [default: the shipped corpus]")
    tokens: int | None = option(
        "--tokens", "N", "Tokens of the text to compare at.  [default: 8192]", whole_number(64, 100_000_000)
    )
    prompts: str | None = option("--prompts", "FILE", "Prompts, one a line, whose outputs to show side by side.")
    tasks: str | None = option(
        "--tasks", "NAME|FILE,...", "Tasks of lm-evaluation-harness (mmlu,gsm8k), or YAML files of own ones."
    )
    task_limit: int | None = option("--task-limit", "N", "Questions of each task.", whole_number(1, 100_000_000))
    task_data: str | None = option(
        "--task-data",
        "DIR",
        "Folder with the data sets of --tasks by their names (DIR/openai/gsm8k), which then need no network.",
    )
    run_dir: str | None = option("--run-dir", "DIR", "Folder for answers and logs.  [default: a new one in runs/]")
    resume: bool = flag("--resume", "Go on with the run in --run-dir, or with the newest in runs/.")


@dataclass(frozen=True, kw_only=True)
class TuneOptions(TrafficOptions):
    """Options of `moe-optimizer tune`."""

    goal: str | None = option(
        "--goal",
        "GOAL",
        'throughput, latency, or limits that 99 of 100 requests keep: "ttft<200ms,tpot<30ms".  [default: throughput]',
    )
    budget: float | None = option(
        "--budget", "DURATION", "Time to spend, for example 20m.  [default: 20m; 10m with --only triton]", seconds
    )
    only: str | None = choice(
        "--only", ONLY_TRITON, "Only this step: launch parameters of vLLM's Triton MoE kernel.", (ONLY_TRITON,)
    )
    clients: str | None = option(
        "--clients", "N,N,...", "Clients of the closed loop.  [default: the batch size; on a CPU 2 a core]"
    )
    rates: str | None = option("--rates", "X,X,...", "Requests per second of an open loop, instead of clients.")
    repetitions: int | None = option(
        "--repetitions", "N", "Rounds of each candidate; the more, the narrower.  [default: 4]", whole_number(2, 1000)
    )
    seed: int = option(
        "--seed", "N", "Of the search among settings.  [default: 0]", whole_number(0, 2**31 - 1), default=0
    )
    run_dir: str | None = option("--run-dir", "DIR", "Folder for plan and ledger.  [default: a new one in runs/]")
    resume: bool = flag("--resume", "Go on with the run in --run-dir, or with the newest in runs/.")
    tokens: str | None = option(
        "--tokens", "N,N,...", "Of --only triton: numbers of tokens to tune for.  [default: powers of 2 up to 8192]"
    )
    folder: str | None = option("--folder", "DIR", "Of --only triton: where to write.  [default: where serve looks]")


@dataclass(frozen=True, kw_only=True)
class MeasureSpeedsOptions(PlanOptions):
    """Options of `moe-optimizer measure speeds`."""

    budget: float | None = option("--budget", "SECONDS", "Time to spend.  [default: 60]", seconds)


@dataclass(frozen=True, kw_only=True)
class MeasureLinksOptions(CommonOptions):
    """Options of `moe-optimizer measure links`."""

    gpus: int | None = option(
        "--gpus", "N", "Measure up to so many GPUs together.  [default: all]", whole_number(2, 1024)
    )


@dataclass(frozen=True, kw_only=True)
class MeasureStepOptions(PlanOptions):
    """Options of `moe-optimizer measure step`."""

    batches: str = option(
        "--batches", "N,N,...", "Sequences decoded together.  [default: 1,8,64,256]", default="1,8,64,256"
    )
    context_tokens: int = option(
        "--context", "N", "Tokens of each sequence, at most.  [default: 512]", whole_number(1, 16_777_216), default=512
    )
    steps: int = option("--steps", "N", "Counted steps.  [default: 20]", whole_number(1, 10_000), default=20)
    timeout: float | None = option("--timeout", "SECONDS", "Limit for each side.  [default: 600]", seconds)


@dataclass(frozen=True, kw_only=True)
class MeasureTextOptions(ModelOptions):
    """Options of `moe-optimizer measure activation-norms`."""

    text: str | None = option("--text", "FILE", "UTF-8 text that is like the traffic to come.")
    output: str | None = option("--output", "FILE", "File to write.")
    max_tokens: int | None = option(
        "--max-tokens", "N", "Tokens of the text to run.  [default: 4096]", whole_number(1, 16_777_216)
    )


@dataclass(frozen=True, kw_only=True)
class SensitivityOptions(MeasureTextOptions):
    """Options of `moe-optimizer measure fp8-sensitivity`."""

    granularity: str = choice(
        "--granularity", "block|channel", "Scales of FP8.  [default: block]", GRANULARITIES, default="block"
    )


@dataclass(frozen=True, kw_only=True)
class FourBitSensitivityOptions(MeasureTextOptions):
    """Options of `moe-optimizer measure four-bit-sensitivity`."""

    format: str = choice(
        "--format", "mxfp4|int4", "Of the experts.  [default: mxfp4]", ("mxfp4", "int4"), default="mxfp4"
    )
    group: str | None = choice(
        "--group", "32|64|128", "Weights that share a scale, of int4.  [default: 32]", ("32", "64", "128")
    )


_HTML = "Write the report to this file, which needs no network."


@dataclass(frozen=True, kw_only=True)
class ReportOptions(CommonOptions):
    """Options of `moe-optimizer report`."""

    sources: list[str] = field(
        default_factory=list,
        metadata={
            DECLARATION: typer.Argument(
                metavar="SOURCE...",
                help="Run folder, or files that other commands wrote with --json.",
                show_default=False,
            )
        },
    )
    html: str | None = option("--html", "FILE", f"{_HTML}  [default: report.html in the run folder, or here]")


@dataclass(frozen=True, kw_only=True)
class CompareResultsOptions(CommonOptions):
    """Options of `moe-optimizer compare`."""

    first: str | None = argument("A", "Result of bench --json, record, or folder of a bench run.")
    second: str | None = argument("B", "The same.")
    allow_different: bool = flag("--allow-different", "Compare although machines, versions or workloads differ.")


@dataclass(frozen=True, kw_only=True)
class TopOptions(CommonOptions):
    """Options of `moe-optimizer top`."""

    source: str | None = argument("SOURCE", "URL of a vLLM server, or run folder of serve.")
    interval: float | None = option("--interval", "SECONDS", "Length of an interval.  [default: 1]", seconds)
    once: bool = flag("--once", "Show one interval and stop.")
