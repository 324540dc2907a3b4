"""Declares the options of every command, as dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import typer

from moe_optimizer.cli.option_values import (
    completes,
    layout_name,
    milliseconds,
    one_of,
    seconds,
    seconds_or_none,
    switch_name,
    whole_number,
)
from moe_optimizer.env import GOALS
from moe_optimizer.errors import InputError
from moe_optimizer.plan.serve_args import NO_ARGUMENTS, ServeArguments

SWITCHES: Mapping[str, str] = {
    "parallelism": "split the model over the GPUs (TP, EP, DP)",
    "expert-parallel": "whole experts on each GPU instead of slices (EP)",
    "fp8": "FP8 weights",
    "sparsity": "2:4 sparse experts",
    "flash-dmoe": "our expert kernel instead of vLLM's",
    "expert-load": "count the tokens that each expert is given",
    "expert-placement": "place and replicate experts by their load",
    "tuned-configs": "use a tuned Triton MoE configuration",
    "graph-capture": "CUDA graphs for every planned batch size",
    "scheduler": "requests and tokens in one step, from batch size and memory",
    "kv-cache": "FP8 key/value cache",
    "kv-tiering": "keep cold cache blocks in host memory",
    "disaggregation": "separate servers for prefill and decode",
    "replicas": "whole servers behind a router, each on its share of the GPUs",
    "dual-batch-overlap": "overlap expert exchange with computation",
}
"""X of --enable-X and --disable-X -> what it does. Copied from the passes: importing them would slow --help down."""

DECLARATION = "declaration"
"""Key of a field's metadata: the typer option or argument that fills the field."""
ENGINES = ("vllm", "embedded", "auto")
RENDERINGS = ("ray", "lws")
GRANULARITIES = ("block", "channel")
ONLY_TRITON = "triton"
DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_READY_TIMEOUT_S = 1800.0
DEFAULT_STALL_TIMEOUT_S = 60.0
DEFAULT_CALIBRATE_S = 30.0


def _profiles() -> Iterable[str]:
    from moe_optimizer.profiles import profile_names

    return profile_names()


def _hardware() -> Iterable[str]:
    from moe_optimizer.inspection.hardware_catalog import hardware_names

    return hardware_names()


def _workloads() -> Iterable[str]:
    from moe_optimizer.measure.bench.workload import workload_names

    return workload_names()


def _flag(name: str, text: str) -> Any:
    """Declare an option without a value."""
    return field(default=False, metadata={DECLARATION: typer.Option(name, help=text)})


def _argument(metavar: str, text: str) -> Any:
    """Declare an argument that may be left out."""
    return field(default=None, metadata={DECLARATION: typer.Argument(metavar=metavar, help=text, show_default=False)})


def _option(
    name: str,
    metavar: str,
    text: str,
    parser: Callable[[str], Any] | None = None,
    *,
    values: Iterable[str] | Callable[[], Iterable[str]] = (),
    default: Any = None,
) -> Any:
    """Declare an option with a value; the shell completes it from `values`."""
    declared = typer.Option(
        name, metavar=metavar, help=text, parser=parser, autocompletion=completes(values), show_default=False
    )
    return field(default=default, metadata={DECLARATION: declared})


def _choice(name: str, metavar: str, text: str, choices: tuple[str, ...], *, default: str | None = None) -> Any:
    """Declare an option whose value is one of `choices`."""
    return _option(name, metavar, text, one_of(choices), values=choices, default=default)


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every command."""

    json: bool = _flag("--json", "Print the result as JSON on stdout.")
    verbose: bool = _flag("--verbose", "Print every message, our decisions, and the traceback of an internal error.")


@dataclass(frozen=True, kw_only=True)
class MayNameModelOptions(CommonOptions):
    """Options of a command that takes a model, as argument or flag."""

    model_argument: str | None = _argument("MODEL", "The same as --model.")
    model: str | None = _option("--model", "MODEL", "Hugging Face id, or folder with config.json.")

    @property
    def named_model(self) -> str | None:
        """The model, or None if none was given.

        Raises:
            InputError: two different models, or an empty name.
        """
        names = [name for name in (self.model_argument, self.model) if name is not None]
        if len(set(names)) > 1:
            raise InputError(f"two models: got {self.model_argument!r} and --model {self.model!r}, expected one")
        if "" in names:
            raise InputError("--model: got '', expected a Hugging Face id or a folder")
        return names[0] if names else None


@dataclass(frozen=True, kw_only=True)
class ModelOptions(MayNameModelOptions):
    """Options of a command that needs a model."""

    trust_remote_code: bool = _flag("--trust-remote-code", "Let vLLM run Python code that comes with the model.")

    @property
    def model_name(self) -> str:
        """The model.

        Raises:
            InputError: no model, two different models, or an empty name.
        """
        name = self.named_model
        if name is None:
            raise InputError("--model: is missing", hint="name a Hugging Face id or a folder: --model DIR")
        return name


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ModelOptions):
    """Options that a plan depends on; None if not given."""

    gpus: int | None = _option("--gpus", "N", "GPUs to use.", whole_number(1, 65_536))
    profile: str | None = _option(
        "--profile",
        "NAME|FILE",
        "conservative, balanced, aggressive, single_h100, or a YAML file.  [default: balanced]",
        values=_profiles,
    )
    batch_size: int | None = _option("--batch-size", "B", "Requests decoded at the same time.", whole_number(1, 65_536))
    input_tokens: int | None = _option(
        "--input-tokens", "TOKENS", "Typical prompt length.", whole_number(1, 16_777_216)
    )
    output_tokens: int | None = _option(
        "--output-tokens", "TOKENS", "Typical completion length.", whole_number(1, 16_777_216)
    )
    layout: str | None = _option(
        "--layout",
        "NAME",
        "Exactly this layout over the GPUs, for example tp4x2: two servers of four GPUs each.",
        layout_name,
    )
    max_model_len: int | None = _option(
        "--max-model-len", "TOKENS", "Longest prompt plus completion.", whole_number(1, 16_777_216)
    )
    dtype: str | None = _choice("--dtype", "DTYPE", f"{', '.join(DTYPES)}.  [default: auto]", DTYPES)
    host: str | None = _option("--host", "HOST", f"Address to serve on.  [default: {DEFAULT_HOST}]")
    port: int | None = _option(
        "--port", "PORT", f"Port to serve on.  [default: {DEFAULT_PORT}]", whole_number(1, 65_535)
    )
    engine: str | None = _choice(
        "--engine",
        "|".join(ENGINES),
        "Serving engine; auto: vLLM where it runs, else the embedded one.  [default: vllm]",
        ENGINES,
    )
    hardware: str | None = _option(
        "--hardware",
        "NAME",
        "Plan for this entry of configs/hardware, for example h100_sxm, instead of this machine; "
        "cpu: this machine without its GPUs.",
        values=_hardware,
    )
    expert_load: str | None = _option(
        "--expert-load", "FILE", "Place experts by this measured load (expert_load.json of a run)."
    )
    expert_load_check: str | None = _option(
        "--expert-load-check",
        "FILE",
        "Compute the gain of the placement on this load, measured on other traffic.",
    )
    require: list[str] = field(
        default_factory=list,
        metadata={
            DECLARATION: typer.Option(
                "--require",
                metavar="X",
                help="Exit 6 unless this optimization runs in every worker. May be repeated.",
                parser=switch_name,
                autocompletion=completes(SWITCHES),
            )
        },
    )
    strict: bool = _flag("--strict", "No fallback: exit 3 if a wished optimization is refused, 6 if one does not run.")
    show_config: bool = _flag("--show-config", "Print every setting with its origin, and stop.")
    nodes: int = 1
    """Number of machines; only `plan` plans for several."""
    switches: Mapping[str, bool] = field(default_factory=dict)
    """X of --enable-X (True) and --disable-X (False); absent if neither was given."""
    vllm_args: ServeArguments = NO_ARGUMENTS
    """The arguments after `--`."""

    @property
    def one_server(self) -> bool:
        """Whether to plan one server over all machines."""
        return False


@dataclass(frozen=True, kw_only=True)
class AimOptions(PlanOptions):
    """Options of a command that plans for a load: what the layout over the GPUs is chosen for."""

    goal: str | None = _choice(
        "--goal", "|".join(GOALS), "What the layout over the GPUs is chosen for.  [default: balanced]", GOALS
    )
    clients: int | None = _option(
        "--clients",
        "N",
        "Requests at the same time over all servers.  [default: the batch size]",
        whole_number(1, 1_048_576),
    )
    ttft: float | None = _option(
        "--ttft", "MS", "Exit 4 unless a layout is predicted to give the first token by then.", milliseconds
    )
    tpot: float | None = _option(
        "--tpot", "MS", "Exit 4 unless a layout is predicted to take at most this per token.", milliseconds
    )


@dataclass(frozen=True, kw_only=True)
class PlanCommandOptions(AimOptions):
    """Options of `moe-optimizer plan`."""

    explain: bool = _flag("--explain", "Add evidence, rejected alternatives and limits of every decision.")
    nodes: int = _option(
        "--nodes",
        "N",
        "Number of equal machines to plan for; --gpus counts the GPUs of all.  [default: 1]",
        whole_number(1, 1024),
        default=1,
    )
    render: str | None = _choice(
        "--render",
        "|".join(RENDERINGS),
        "Print only what starts the plan: commands for one server through Ray, or a Kubernetes LeaderWorkerSet.",
        RENDERINGS,
    )

    @property
    def one_server(self) -> bool:
        """True for `--render ray`: Ray connects the machines of one server."""
        return self.render == "ray"


@dataclass(frozen=True, kw_only=True)
class ServeOptions(AimOptions):
    """Options of `moe-optimizer serve` and `run_optimizer.py`."""

    plan: str | None = _option("--plan", "FILE", "Serve this plan, of `tune` or of a run, as it is; plan nothing.")
    dry_run: bool = _flag("--dry-run", "Print the plan and the exact vLLM command, and stop.")
    run_dir: str | None = _option("--run-dir", "DIR", "Folder for plan, proofs, log.  [default: a new one in runs/]")
    ready_timeout: float | None = _option(
        "--ready-timeout",
        "SECONDS",
        f"Stop if the server is not ready by then.  [default: {DEFAULT_READY_TIMEOUT_S:g}]",
        seconds,
    )
    stall_timeout: float | None = _option(
        "--stall-timeout",
        "SECONDS",
        f"Stop if requests make no progress for so long; 0: never.  [default: {DEFAULT_STALL_TIMEOUT_S:g}]",
        seconds_or_none,
    )
    restart: int = _option(
        "--restart",
        "N",
        "Start again, N times at most, when a server that was ready ends or hangs.  [default: 0]",
        whole_number(0, 1000),
        default=0,
    )
    calibrate: float | None = _option(
        "--calibrate",
        "SECONDS",
        "Time limit for measuring the expert kernels before the start, if no table of kernel speeds fits this "
        f"machine and model; 0: never.  [default: {DEFAULT_CALIBRATE_S:g}]",
        seconds_or_none,
    )
    no_warm_up: bool = _flag("--no-warm-up", "Be ready as soon as vLLM answers, although first requests may compile.")


@dataclass(frozen=True, kw_only=True)
class MeasuredServersOptions(PlanOptions):
    """Options of a command that starts servers to measure them."""

    ready_timeout: float | None = _option(
        "--ready-timeout",
        "SECONDS",
        f"Stop if a server is not ready by then.  [default: {DEFAULT_READY_TIMEOUT_S:g}]",
        seconds,
    )
    calibrate: float | None = _option(
        "--calibrate",
        "SECONDS",
        f"Time limit for measuring the expert kernels before the start.  [default: {DEFAULT_CALIBRATE_S:g}]",
        seconds_or_none,
    )


@dataclass(frozen=True, kw_only=True)
class TrafficOptions(MeasuredServersOptions):
    """Options of a command that sends a workload to the servers."""

    workload: str = _option(
        "--workload",
        "NAME|FILE",
        "Of configs/workloads, or a YAML file, or a trace (.jsonl).  [default: chat]",
        values=_workloads,
        default="chat",
    )
    clients: str | None = _option("--clients", "N,N,...", "Clients of the closed loop, instead of the workload's.")
    rates: str | None = _option("--rates", "X,X,...", "Requests per second of an open loop, instead of the workload's.")
    requests_per_client: int | None = _option(
        "--requests-per-client", "N", "In each round, instead of the workload's.", whole_number(1, 65_536)
    )


@dataclass(frozen=True, kw_only=True)
class BenchOptions(TrafficOptions):
    """Options of `moe-optimizer bench`."""

    plan: str | None = _option("--plan", "FILE", "Serve this plan (plan.json of a run) instead of a profile's.")
    against: str | None = _option(
        "--against", "stock|PROFILE|FILE|URL", "What to compare with; '': nothing.  [default: stock]"
    )
    repetitions: int | None = _option(
        "--repetitions", "N", "Rounds of each side; the more, the narrower.  [default: 5]", whole_number(2, 1000)
    )
    ttft: float | None = _option("--ttft", "MS", "Count requests within this time to the first token.", seconds)
    tpot: float | None = _option("--tpot", "MS", "Count requests within this time per output token.", seconds)
    tokenizer: str | None = _option("--tokenizer", "DIR", "Where prompts come from.  [default: the model]")
    run_dir: str | None = _option("--run-dir", "DIR", "Folder for samples and logs.  [default: a new one in runs/]")
    html: str | None = _option("--html", "FILE", "Also write a report: one file, which needs no network.")


@dataclass(frozen=True, kw_only=True)
class QualityOptions(MeasuredServersOptions):
    """Options of `moe-optimizer quality`."""

    plan: str | None = _option("--plan", "FILE", "Judge this plan (plan.json of a run) instead of a profile's.")
    against: str | None = _option(
        "--against",
        "stock|embedded|URL|...",
        "The reference: stock vLLM, the embedded engine in float32, a running server, a profile or a plan's file.  "
        "[default: stock]",
    )
    per_pass: bool = _flag("--per-pass", "Measure each pass alone too, also where the plan keeps every threshold.")
    data: str | None = _option("--data", "FILE", "UTF-8 text to compare on.  [default: the shipped corpus]")
    tokens: int | None = _option(
        "--tokens", "N", "Tokens of the text to compare at.  [default: 8192]", whole_number(64, 100_000_000)
    )
    prompts: str | None = _option("--prompts", "FILE", "Prompts, one a line, whose outputs to show side by side.")
    tasks: str | None = _option("--tasks", "NAME,...", "Tasks of lm-evaluation-harness, for example mmlu,gsm8k.")
    task_limit: int | None = _option("--task-limit", "N", "Questions of each task.", whole_number(1, 100_000_000))
    run_dir: str | None = _option("--run-dir", "DIR", "Folder for answers and logs.  [default: a new one in runs/]")


@dataclass(frozen=True, kw_only=True)
class TuneOptions(TrafficOptions):
    """Options of `moe-optimizer tune`."""

    goal: str | None = _option(
        "--goal",
        "GOAL",
        'throughput, latency, or limits that 99 of 100 requests keep: "ttft<200ms,tpot<30ms".  [default: throughput]',
    )
    budget: float | None = _option(
        "--budget", "DURATION", "Time to spend, for example 20m.  [default: 20m; 10m with --only triton]", seconds
    )
    only: str | None = _choice(
        "--only", ONLY_TRITON, "Only this step: launch parameters of vLLM's Triton MoE kernel.", (ONLY_TRITON,)
    )
    clients: str | None = _option("--clients", "N,N,...", "Clients of the closed loop.  [default: the batch size]")
    rates: str | None = _option("--rates", "X,X,...", "Requests per second of an open loop, instead of clients.")
    repetitions: int | None = _option(
        "--repetitions", "N", "Rounds of each candidate; the more, the narrower.  [default: 4]", whole_number(2, 1000)
    )
    seed: int = _option(
        "--seed", "N", "Of the search among settings.  [default: 0]", whole_number(0, 2**31 - 1), default=0
    )
    run_dir: str | None = _option("--run-dir", "DIR", "Folder for plan and ledger.  [default: a new one in runs/]")
    tokens: str | None = _option(
        "--tokens", "N,N,...", "Of --only triton: numbers of tokens to tune for.  [default: powers of 2 up to 8192]"
    )
    folder: str | None = _option("--folder", "DIR", "Of --only triton: where to write.  [default: where serve looks]")


@dataclass(frozen=True, kw_only=True)
class MeasureSpeedsOptions(PlanOptions):
    """Options of `moe-optimizer measure speeds`."""

    budget: float | None = _option("--budget", "SECONDS", "Time to spend.  [default: 60]", seconds)


@dataclass(frozen=True, kw_only=True)
class MeasureStepOptions(PlanOptions):
    """Options of `moe-optimizer measure step`."""

    batches: str = _option(
        "--batches", "N,N,...", "Sequences decoded together.  [default: 1,8,64,256]", default="1,8,64,256"
    )
    context_tokens: int = _option(
        "--context", "N", "Tokens of each sequence.  [default: 512]", whole_number(1, 16_777_216), default=512
    )
    steps: int = _option("--steps", "N", "Counted steps.  [default: 20]", whole_number(1, 10_000), default=20)
    timeout: float | None = _option("--timeout", "SECONDS", "Limit for each side.  [default: 600]", seconds)


@dataclass(frozen=True, kw_only=True)
class MeasureTextOptions(ModelOptions):
    """Options of `moe-optimizer measure activation-norms`."""

    text: str | None = _option("--text", "FILE", "UTF-8 text that is like the traffic to come.")
    output: str | None = _option("--output", "FILE", "File to write.")
    max_tokens: int | None = _option(
        "--max-tokens", "N", "Tokens of the text to run.  [default: 4096]", whole_number(1, 16_777_216)
    )


@dataclass(frozen=True, kw_only=True)
class SensitivityOptions(MeasureTextOptions):
    """Options of `moe-optimizer measure fp8-sensitivity`."""

    granularity: str = _choice(
        "--granularity", "block|channel", "Scales of FP8.  [default: block]", GRANULARITIES, default="block"
    )


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(MayNameModelOptions):
    """Options of `moe-optimizer doctor`."""

    drift: bool = _flag("--drift", "Also check the places in the installed vLLM that this package builds on.")


@dataclass(frozen=True, kw_only=True)
class ExpertsOptions(CommonOptions):
    """Options of `moe-optimizer experts`."""

    source: str | None = _argument("SOURCE", "Run folder, expert_load.json, or URL.")
    png: str | None = _option("--png", "FILE", "Also write the heatmap as a picture (needs pillow).")
    top: int = _option(
        "--top", "N", "Number of busiest experts to list.  [default: 5]", whole_number(0, 1_000_000), default=5
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
    html: str | None = _option("--html", "FILE", f"{_HTML}  [default: report.html in the run folder, or here]")


@dataclass(frozen=True, kw_only=True)
class CompareResultsOptions(CommonOptions):
    """Options of `moe-optimizer compare`."""

    first: str | None = _argument("A", "Result of bench --json, record, or folder of a bench run.")
    second: str | None = _argument("B", "The same.")
    allow_different: bool = _flag("--allow-different", "Compare although machines, versions or workloads differ.")


@dataclass(frozen=True, kw_only=True)
class TopOptions(CommonOptions):
    """Options of `moe-optimizer top`."""

    source: str | None = _argument("SOURCE", "URL of a vLLM server, or run folder of serve.")
    interval: float | None = _option("--interval", "SECONDS", "Length of an interval.  [default: 1]", seconds)
    once: bool = _flag("--once", "Show one interval and stop.")


@dataclass(frozen=True, kw_only=True)
class BuildOptions(CommonOptions):
    """Options of `moe-optimizer build`."""

    check: bool = _flag("--check", "Only report what is built.")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ModelOptions):
    """Options of `moe-optimizer debug compare`."""

    layer: int | None = _option("--layer", "N", "Only this layer.  [default: all]", whole_number(0, 100_000))


@dataclass(frozen=True, kw_only=True)
class OracleOptions(ModelOptions):
    """Options of `moe-optimizer debug oracle`."""

    url: str = _option("--url", "URL", "Base URL of the server.", default="http://127.0.0.1:8000")
    tolerance: float = _option(
        "--tolerance", "NATS", "Largest difference of a log-probability.  [default: 0.1]", float, default=0.1
    )


@dataclass(frozen=True, kw_only=True)
class GenerationsOptions(ModelOptions):
    """Options of `moe-optimizer debug generations`."""

    save: str | None = _option("--save", "FILE", "Keep the outputs here.")
    against: str | None = _option("--against", "FILE", "Compare with the outputs kept here.")
