"""Declares the options of every command, as dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from moe_optimizer.cli.option_values import completes, seconds, seconds_or_none, switch_name, whole_number
from moe_optimizer.errors import InputError

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
"""X of --enable-X and --disable-X -> what it does. Written out, because asking the passes would slow --help down."""

ENGINES = ("vllm", "embedded")
RENDERINGS = ("ray", "lws")
DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_READY_TIMEOUT_S = 1800.0
DEFAULT_CALIBRATE_S = 20.0


def _profiles() -> Iterable[str]:
    from moe_optimizer.profiles import profile_names

    return profile_names()


def _hardware() -> Iterable[str]:
    from moe_optimizer.inspection import hardware_names

    return hardware_names()


def _option(flag: str, metavar: str, text: str, parser: Callable[[str], Any] | None = None) -> Any:
    """Return the declaration of an option that takes a value."""
    return typer.Option(flag, metavar=metavar, help=text, parser=parser, show_default=False)


def _choice(flag: str, metavar: str, text: str, values: Iterable[str] | Callable[[], Iterable[str]]) -> Any:
    """Return the declaration of an option whose values the shell can complete."""
    return typer.Option(flag, metavar=metavar, help=text, autocompletion=completes(values), show_default=False)


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """What every command takes."""

    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print every message, and the traceback of an internal error.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class MayNameModelOptions(CommonOptions):
    """A command that a model may be named to, by argument or flag."""

    model_argument: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None
    model: Annotated[str | None, _option("--model", "MODEL", "Hugging Face id, or folder with config.json.")] = None

    @property
    def named_model(self) -> str | None:
        """The model that was named, None where none was.

        Raises:
            InputError: two different ones were, or one without a name.
        """
        names = [name for name in (self.model_argument, self.model) if name is not None]
        if len(set(names)) > 1:
            raise InputError(f"two models: got {self.model_argument!r} and --model {self.model!r}, expected one")
        if "" in names:
            raise InputError("--model: got '', expected a Hugging Face id or a folder")
        return names[0] if names else None


@dataclass(frozen=True, kw_only=True)
class ModelOptions(MayNameModelOptions):
    """A command about one model."""

    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let vLLM run Python code that comes with the model.")
    ] = False

    @property
    def model_name(self) -> str:
        """The model that was named.

        Raises:
            InputError: none was, or two different ones.
        """
        name = self.named_model
        if name is None:
            raise InputError("--model: is missing", hint="name a Hugging Face id or a folder: --model DIR")
        return name


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ModelOptions):
    """Everything a plan depends on; None where the command line does not say."""

    gpus: Annotated[int | None, _option("--gpus", "N", "GPUs to use.", whole_number(1, 65_536))] = None
    profile: Annotated[
        str | None,
        _choice(
            "--profile",
            "NAME|FILE",
            "conservative, balanced, aggressive, single_h100, or a YAML file.  [default: balanced]",
            _profiles,
        ),
    ] = None
    batch_size: Annotated[
        int | None, _option("--batch-size", "B", "Requests decoded at the same time.", whole_number(1, 65_536))
    ] = None
    max_model_len: Annotated[
        int | None,
        _option("--max-model-len", "TOKENS", "Longest prompt plus completion.", whole_number(1, 16_777_216)),
    ] = None
    dtype: Annotated[str | None, _choice("--dtype", "DTYPE", f"{', '.join(DTYPES)}.  [default: auto]", DTYPES)] = None
    host: Annotated[str | None, _option("--host", "HOST", f"Address to serve on.  [default: {DEFAULT_HOST}]")] = None
    port: Annotated[
        int | None,
        _option("--port", "PORT", f"Port to serve on.  [default: {DEFAULT_PORT}]", whole_number(1, 65_535)),
    ] = None
    engine: Annotated[str | None, _choice("--engine", "|".join(ENGINES), "What serves.  [default: vllm]", ENGINES)] = (
        None
    )
    hardware: Annotated[
        str | None,
        _choice(
            "--hardware",
            "NAME",
            "Plan for this machine of configs/hardware instead of the one at hand, for example h100_sxm; "
            "cpu: this one without its GPUs.",
            _hardware,
        ),
    ] = None
    expert_load: Annotated[
        str | None, _option("--expert-load", "FILE", "Place experts by this measured load (expert_load.json of a run).")
    ] = None
    expert_load_check: Annotated[
        str | None,
        _option(
            "--expert-load-check",
            "FILE",
            "State the gain of the placement on this load, of other traffic than --expert-load.",
        ),
    ] = None
    require: Annotated[
        list[str],
        typer.Option(
            "--require",
            parser=switch_name,
            metavar="X",
            help="Optimization that must run in every worker, or exit 6. May be repeated.",
            autocompletion=completes(SWITCHES),
        ),
    ] = field(default_factory=list)
    strict: Annotated[
        bool,
        typer.Option("--strict", help="No fallback: a refused wish exits 3, a planned one that does not run 6."),
    ] = False
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print every setting with where it comes from, and stop.")
    ] = False
    nodes: int = 1
    """Machines; only `plan` plans for several."""
    switches: Mapping[str, bool] = field(default_factory=dict)
    """X of --enable-X (True) and --disable-X (False); absent where neither was given."""
    vllm_args: tuple[str, ...] = ()
    """What followed `--`."""

    @property
    def one_server(self) -> bool:
        """Whether one server over all machines is asked for."""
        return False


@dataclass(frozen=True, kw_only=True)
class PlanCommandOptions(PlanOptions):
    """`moe-optimizer plan`."""

    explain: Annotated[
        bool, typer.Option("--explain", help="Add evidence, rejected alternatives and limits of every decision.")
    ] = False
    nodes: Annotated[
        int,
        _option(
            "--nodes",
            "N",
            "Machines to plan for, all alike; --gpus counts the GPUs of all of them.  [default: 1]",
            whole_number(1, 1024),
        ),
    ] = 1
    render: Annotated[
        str | None,
        _choice(
            "--render",
            "|".join(RENDERINGS),
            "Print only what starts it: one server over all machines, through Ray; or a Kubernetes LeaderWorkerSet.",
            RENDERINGS,
        ),
    ] = None

    @property
    def one_server(self) -> bool:
        """`--render ray`: without one there is nothing for Ray to connect."""
        return self.render == "ray"


@dataclass(frozen=True, kw_only=True)
class ServeOptions(PlanOptions):
    """`moe-optimizer serve` and `run_optimizer.py`."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and the exact vLLM command, and stop.")] = (
        False
    )
    run_dir: Annotated[
        str | None, _option("--run-dir", "DIR", "Folder for plan, proofs, log.  [default: a new one in runs/]")
    ] = None
    ready_timeout: Annotated[
        float | None,
        _option(
            "--ready-timeout",
            "SECONDS",
            f"Give up when the server is not ready by then.  [default: {DEFAULT_READY_TIMEOUT_S:g}]",
            seconds,
        ),
    ] = None
    calibrate: Annotated[
        float | None,
        _option(
            "--calibrate",
            "SECONDS",
            "Measure the expert kernels for at most so long before the start, where no table of their speeds "
            f"fits this machine and model; 0: never.  [default: {DEFAULT_CALIBRATE_S:g}]",
            seconds_or_none,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TuneOptions(PlanOptions):
    """`moe-optimizer tune`."""

    budget: Annotated[float | None, _option("--budget", "SECONDS", "Time to spend.  [default: 600]", seconds)] = None
    tokens: Annotated[
        str | None, _option("--tokens", "N,N,...", "Numbers of tokens to tune for.  [default: powers of 2 up to 8192]")
    ] = None
    folder: Annotated[
        str | None, _option("--folder", "DIR", "Where to write.  [default: where serve looks: the user's cache]")
    ] = None


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(MayNameModelOptions):
    """`moe-optimizer doctor`."""

    drift: Annotated[
        bool, typer.Option("--drift", help="Also compare the places in vLLM that we build on with the installed vLLM.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ExpertsOptions(CommonOptions):
    """`moe-optimizer experts`."""

    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="Run folder, expert_load.json, or URL.", show_default=False)
    ] = None
    png: Annotated[str | None, _option("--png", "FILE", "Also write the heatmap as a picture (needs pillow).")] = None
    top: Annotated[
        int, _option("--top", "N", "Name the N busiest experts.  [default: 5]", whole_number(0, 1_000_000))
    ] = 5


@dataclass(frozen=True, kw_only=True)
class BuildOptions(CommonOptions):
    """`moe-optimizer build`."""

    check: Annotated[bool, typer.Option("--check", help="Only report what is built.")] = False
