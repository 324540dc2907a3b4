"""Declares the options of the commands, as dataclasses; those that measure: `measuring_options`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import typer

from moe_optimizer.cli.option_fields import DECLARATION, argument, choice, flag, option
from moe_optimizer.cli.option_values import (
    completes,
    layout_name,
    milliseconds,
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
    "four-bit": "experts in four bits (MXFP4, INT4)",
    "sparsity": "2:4 sparse experts",
    "flash-dmoe": "our expert kernel instead of vLLM's",
    "expert-load": "count the tokens that each expert is given",
    "expert-placement": "place and replicate experts by their load",
    "tuned-configs": "use a tuned Triton MoE configuration",
    "graph-capture": "CUDA graphs for every planned batch size, and for steps that read prompts",
    "norm-rope-fusion": "norms of queries and keys with RoPE in one kernel of vLLM",
    "skinny-gemm": "products of few tokens with dense weights by our kernel",
    "speculation": "draft several tokens, check them in one step",
    "scheduler": "requests and tokens in one step, from batch size and memory",
    "kv-cache": "FP8 key/value cache",
    "kv-tiering": "keep cold cache blocks in host memory",
    "disaggregation": "separate servers for prefill and decode",
    "replicas": "whole servers behind a router, each on its share of the GPUs",
    "dual-batch-overlap": "overlap expert exchange with computation",
}
"""X of --enable-X and --disable-X -> what it does. Copied from the passes: importing them would slow --help down."""

ENGINES = ("vllm", "embedded", "auto")
RENDERINGS = ("ray", "lws")
GRANULARITIES = ("block", "channel")
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


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every command."""

    json: bool = flag("--json", "Print the result as JSON on stdout.")
    verbose: bool = flag("--verbose", "Print every message, our decisions, and the traceback of an internal error.")


@dataclass(frozen=True, kw_only=True)
class MayNameModelOptions(CommonOptions):
    """Options of a command that takes a model, as argument or flag."""

    model_argument: str | None = argument("MODEL", "The same as --model.")
    model: str | None = option("--model", "MODEL", "Hugging Face id, or folder with config.json.")

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

    trust_remote_code: bool = flag("--trust-remote-code", "Let vLLM run Python code that comes with the model.")

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

    gpus: int | None = option("--gpus", "N", "GPUs to use.", whole_number(1, 65_536))
    profile: str | None = option(
        "--profile",
        "NAME|FILE",
        "conservative, balanced, aggressive, throughput, single_h100, or a YAML file.  [default: balanced]",
        values=_profiles,
    )
    batch_size: int | None = option("--batch-size", "B", "Requests decoded at the same time.", whole_number(1, 65_536))
    input_tokens: int | None = option("--input-tokens", "TOKENS", "Typical prompt length.", whole_number(1, 16_777_216))
    output_tokens: int | None = option(
        "--output-tokens", "TOKENS", "Typical completion length.", whole_number(1, 16_777_216)
    )
    layout: str | None = option(
        "--layout",
        "NAME",
        "Exactly this layout over the GPUs, for example tp4x2: two servers of four GPUs each.",
        layout_name,
    )
    max_model_len: int | None = option(
        "--max-model-len", "TOKENS", "Longest prompt plus completion.", whole_number(1, 16_777_216)
    )
    dtype: str | None = choice("--dtype", "DTYPE", f"{', '.join(DTYPES)}.  [default: auto]", DTYPES)
    host: str | None = option("--host", "HOST", f"Address to serve on.  [default: {DEFAULT_HOST}]")
    port: int | None = option(
        "--port", "PORT", f"Port to serve on.  [default: {DEFAULT_PORT}]", whole_number(1, 65_535)
    )
    engine: str | None = choice(
        "--engine",
        "|".join(ENGINES),
        "Serving engine; auto: vLLM where it runs, else the embedded one.  [default: vllm]",
        ENGINES,
    )
    hardware: str | None = option(
        "--hardware",
        "NAME",
        "Plan for this entry of configs/hardware, for example h100_sxm, instead of this machine; "
        "cpu: this machine without its GPUs.",
        values=_hardware,
    )
    expert_load: str | None = option(
        "--expert-load", "FILE", "Place experts by this measured load (expert_load.json of a run)."
    )
    expert_load_check: str | None = option(
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
    strict: bool = flag("--strict", "No fallback: exit 3 if a wished optimization is refused, 6 if one does not run.")
    show_config: bool = flag("--show-config", "Print every setting with its origin, and stop.")
    nodes: int = 1
    """Number of machines; only `plan` plans for several."""
    switches: Mapping[str, bool] = field(default_factory=dict)
    """X of --enable-X (True) and --disable-X (False); absent if neither was given."""
    vllm_args: ServeArguments = NO_ARGUMENTS
    """The arguments after `--`."""


@dataclass(frozen=True, kw_only=True)
class AimOptions(PlanOptions):
    """Options of a command that plans for a load: what the layout over the GPUs is chosen for."""

    goal: str | None = choice(
        "--goal", "|".join(GOALS), "What the layout over the GPUs is chosen for.  [default: the profile's]", GOALS
    )
    clients: int | None = option(
        "--clients",
        "N",
        "Requests at the same time over all servers.  [default: the batch size]",
        whole_number(1, 1_048_576),
    )
    ttft: float | None = option(
        "--ttft", "MS", "Exit 4 unless a layout is predicted to give the first token by then.", milliseconds
    )
    tpot: float | None = option(
        "--tpot", "MS", "Exit 4 unless a layout is predicted to take at most this per token.", milliseconds
    )


@dataclass(frozen=True, kw_only=True)
class PlanCommandOptions(AimOptions):
    """Options of `moe-optimizer plan`."""

    explain: bool = flag("--explain", "Add evidence, rejected alternatives and limits of every decision.")
    nodes: int = option(
        "--nodes",
        "N",
        "Number of equal machines to plan for; --gpus counts the GPUs of all.  [default: 1]",
        whole_number(1, 1024),
        default=1,
    )
    render: str | None = choice(
        "--render",
        "|".join(RENDERINGS),
        "Print only what starts the plan: the commands of each machine, with Ray where a server's layers lie on "
        "several, or a Kubernetes LeaderWorkerSet.",
        RENDERINGS,
    )


@dataclass(frozen=True, kw_only=True)
class ServersOptions(PlanOptions):
    """Options of a command that starts servers."""

    ready_timeout: float | None = option(
        "--ready-timeout",
        "SECONDS",
        f"Stop if a server is not ready by then.  [default: {DEFAULT_READY_TIMEOUT_S:g}]",
        seconds,
    )
    calibrate: float | None = option(
        "--calibrate",
        "SECONDS",
        "Time limit for measuring the expert kernels before the start, if no table of kernel speeds fits this "
        f"machine and model; 0: never.  [default: {DEFAULT_CALIBRATE_S:g}]",
        seconds_or_none,
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(AimOptions, ServersOptions):
    """Options of `moe-optimizer serve` and `run_optimizer.py`."""

    plan: str | None = option("--plan", "FILE", "Serve this plan, of `tune` or of a run, as it is; plan nothing.")
    dry_run: bool = flag("--dry-run", "Print the plan and the exact vLLM command, and stop.")
    run_dir: str | None = option("--run-dir", "DIR", "Folder for plan, proofs, log.  [default: a new one in runs/]")
    stall_timeout: float | None = option(
        "--stall-timeout",
        "SECONDS",
        f"Stop if requests make no progress for so long; 0: never.  [default: {DEFAULT_STALL_TIMEOUT_S:g}]",
        seconds_or_none,
    )
    restart: int = option(
        "--restart",
        "N",
        "Start again, N times at most, when a server that was ready ends or hangs.  [default: 0]",
        whole_number(0, 1000),
        default=0,
    )
    no_warm_up: bool = flag("--no-warm-up", "Be ready as soon as vLLM answers, although first requests may compile.")
    no_decode_check: bool = flag("--no-decode-check", "Do not compare what is decoded with prompts before ready.")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(MayNameModelOptions):
    """Options of `moe-optimizer doctor`."""

    drift: bool = flag("--drift", "Also check the places in the installed vLLM that this package builds on.")


@dataclass(frozen=True, kw_only=True)
class ExpertsOptions(CommonOptions):
    """Options of `moe-optimizer experts`."""

    source: str | None = argument("SOURCE", "Run folder, expert_load.json, or URL.")
    png: str | None = option("--png", "FILE", "Also write the heatmap as a picture (needs pillow).")
    top: int = option(
        "--top", "N", "Number of busiest experts to list.  [default: 5]", whole_number(0, 1_000_000), default=5
    )


@dataclass(frozen=True, kw_only=True)
class BuildOptions(CommonOptions):
    """Options of `moe-optimizer build`."""

    check: bool = flag("--check", "Only report what is built.")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ModelOptions):
    """Options of `moe-optimizer debug compare`."""

    layer: int | None = option("--layer", "N", "Only this layer.  [default: all]", whole_number(0, 100_000))


@dataclass(frozen=True, kw_only=True)
class OracleOptions(ModelOptions):
    """Options of `moe-optimizer debug oracle`."""

    url: str = option("--url", "URL", "Base URL of the server.", default="http://127.0.0.1:8000")
    tolerance: float = option(
        "--tolerance", "NATS", "Largest difference of a log-probability.  [default: 0.1]", float, default=0.1
    )


@dataclass(frozen=True, kw_only=True)
class GenerationsOptions(ModelOptions):
    """Options of `moe-optimizer debug generations`."""

    save: str | None = option("--save", "FILE", "Keep the outputs here.")
    against: str | None = option("--against", "FILE", "Compare with the outputs kept here.")
