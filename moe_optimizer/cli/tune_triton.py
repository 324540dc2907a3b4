"""Tunes launch parameters of vLLM's Triton MoE kernel for one model on this GPU: a step of `moe-optimizer tune`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_optimizer.cli import messages
from moe_optimizer.cli.measuring_options import TuneOptions
from moe_optimizer.cli.option_values import whole_numbers
from moe_optimizer.cli.progress import ProgressLines, progress_bar
from moe_optimizer.errors import MoeOptimizerError, UnsupportedError
from moe_optimizer.files import make_private_folder
from moe_optimizer.plan.pass_params import FlashDmoeParams, TunedConfigsParams

if TYPE_CHECKING:
    from moe_optimizer.plan.plan import Plan

DEFAULT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_DEFAULT_BUDGET_S = 600.0
_MOST_TOKENS = 65_536
_MODULE = "moe_optimizer.measure.triton_tuning.tune"
_GRACE_S = 10.0


def tune_triton(options: TuneOptions, *, budget_s: float | None = None) -> messages.Output:
    """Measure launch parameters for the model's experts as the plan splits them, and keep what wins in turns.

    A set is kept if it beats vLLM's own by a margin; vLLM's own serve all other batch sizes. A stopped tuning resumes
    where it was. The serve command finds the result by itself.

    Args:
        options: of `moe-optimizer tune`.
        budget_s: seconds to spend; default: `--budget`.

    Raises:
        UnsupportedError: there is no GPU here, or Triton does not run the experts.
        MoeOptimizerError: nothing can be planned like this, or the tuning died.
    """
    from moe_optimizer.cli import planning

    with messages.held_messages(verbose=options.verbose):
        try:
            settings, request = planning.read_request(options)
            plan = planning.decide(settings, request)
        except UnsupportedError:
            # Without a GPU the reason is the GPU, even if the model does not fit this machine either.
            _check_can_tune_here()
            raise
        _check_can_tune_here()
        wanted = _wanted(plan)
        folder = request.profile.passes.tuned_configs.folder
        asked = _request(plan, wanted, options, folder, budget_s or options.budget or _DEFAULT_BUDGET_S)
    file = Path(asked["folder"]) / wanted.file
    verdicts = run_tuning(asked, ProgressLines(verbose=options.verbose), log=file.with_suffix(".log"))
    written = file if file.is_file() else None
    return messages.Output(
        result={"file": str(written) if written else None, "sizes": verdicts},
        render=lambda found: render(wanted.file, written, found["sizes"]),
    )


def check_left_to_triton(plan: Plan) -> None:
    """Refuse to tune beside kernels of ours that compute everything: their speeds would have to be measured again.

    Raises:
        UnsupportedError: the plan leaves no number of tokens to vLLM's kernel.
    """
    kernels = plan.decision("flash_dmoe").params
    if isinstance(kernels, FlashDmoeParams) and not any(map(kernels.leaves_to_vllm, DEFAULT_TOKENS)):
        raise UnsupportedError("our kernels compute every number of tokens")


def _check_can_tune_here() -> None:
    """Refuse a machine on which tuning cannot run.

    Raises:
        UnsupportedError: no GPU, or no vLLM for it.
    """
    from moe_optimizer.inspection.hardware_probe import probe_hardware
    from moe_optimizer.inspection.vllm_installation import find_vllm

    if probe_hardware().gpu is None:
        raise UnsupportedError(
            "tune: needs a GPU, and this machine has none", hint="run it on the machine that will serve"
        )
    vllm = find_vllm()
    if vllm is None or vllm.device == "cpu":
        raise UnsupportedError("tune: needs a vLLM for GPUs", hint="run: pip install 'vllm>=0.26'")


def _wanted(plan: Plan) -> TunedConfigsParams:
    """Return which configuration is to be tuned.

    Raises:
        UnsupportedError: the plan is for another GPU than the one here, or Triton does not run the experts.
    """
    from moe_optimizer.inspection.hardware_probe import probe_hardware

    here, planned = probe_hardware().gpu, plan.hardware.gpu
    if here is not None and planned is not None and planned.key != here.key:
        raise UnsupportedError(f"tune: planned for {planned.name}, but this machine has {here.name}")
    decision = plan.decision("tuned_configs")
    if not isinstance(decision.params, TunedConfigsParams):
        raise UnsupportedError(f"tune: {decision.reason}")
    return decision.params


def _request(
    plan: Plan, wanted: TunedConfigsParams, options: TuneOptions, profile_folder: str | None, budget_s: float
) -> dict[str, Any]:
    """Return the `TuneRequest` as an object; it is written to where serving with the same profile looks."""
    from moe_optimizer.inspection.tuned_configs import SHIPPED, user_folder
    from moe_optimizer.inspection.vllm_installation import find_vllm

    vllm = find_vllm()
    assert vllm is not None, "_check_can_tune_here has looked"
    folder = options.folder or profile_folder or user_folder(vllm.version, os.environ)
    return {
        "shape": dataclasses.asdict(wanted.shape),
        "num_experts": plan.model.num_experts,
        "top_k": plan.model.top_k,
        "hidden_size": plan.model.expert_hidden_size,
        "dtype": wanted.dtype,
        "tokens": list(_tokens(options.tokens)),
        "budget_s": budget_s,
        "folder": str(Path(folder).absolute()),
        "shipped_folder": str(Path(vllm.location) / SHIPPED),
    }


def _tokens(text: str | None) -> tuple[int, ...]:
    if text is None:
        return DEFAULT_TOKENS
    return tuple(sorted(set(whole_numbers("--tokens", text, _MOST_TOKENS))))


def run_tuning(
    request: Mapping[str, Any], progress: ProgressLines, *, log: Path, module: str = _MODULE
) -> list[dict[str, Any]]:
    """Run a tuning to its end and return its verdicts. No process of the tuning outlives this call.

    Args:
        request: a `TuneRequest` as an object.
        progress: takes a line for each thing done, where there is no terminal for a bar.
        log: what vLLM and Triton print goes here.
        module: the measuring process.

    Raises:
        InputError, UnsupportedError: the tuning refused.
        MoeOptimizerError: it died; what was measured is kept, and the next run goes on from there.
    """
    from moe_optimizer.measure.process import MeasurementError, run_measurement

    make_private_folder(log.parent)
    with progress_bar("tuning", lines=progress) as show:
        try:
            return run_measurement(module, request, on_step=show, log=log, grace_s=_GRACE_S)
        except MeasurementError as error:
            raise MoeOptimizerError(
                f"the tuning ended: {error}",
                hint=f"run it again: it resumes without the configuration that failed; log: {log}",
            ) from None


def render(name: str, written: Path | None, verdicts: list[dict[str, Any]]) -> str:
    """Return the compared numbers of tokens, and the place of the result, as text."""
    lines = [name]
    if verdicts:
        lines += ["", f"  {'tokens':>7}  {'now':>9}  {'tuned':>9}  {'faster':>6}  used for"]
    for verdict in sorted(verdicts, key=lambda entry: entry["tokens"]):
        used = f"{verdict['low']} to {verdict['high']}" if verdict["low"] <= verdict["high"] else "-"
        lines.append(
            f"  {verdict['tokens']:>7}  {verdict['stock_us']:>6.1f} us  {verdict['row_us']:>6.1f} us  "
            f"{verdict['ratio']:>5.2f}x  {used}"
        )
    lines.append("")
    if written is None:
        lines.append("No configuration beat vLLM's own by the margin: no file was written.")
    else:
        lines += [
            f"Written: {written}",
            "The serve command finds it there. Stock vLLM takes it with:",
            f"  VLLM_TUNED_CONFIG_FOLDER={written.parent}",
        ]
    return "\n".join(lines)
