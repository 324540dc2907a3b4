"""Starts the profiling of a plan's decode steps, and of stock vLLM's with the same arguments from the user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from moe_optimizer.child_process import child_process
from moe_optimizer.errors import ServerFailedError, UnsupportedError, printable
from moe_optimizer.measure.decode_step.profiled_steps import ProfiledSteps, StepsRequest
from moe_optimizer.plan.json_codec import decode, encode
from moe_optimizer.plan.plan import Plan

_GRACE_S = 10.0
_LAST_LINES = 5

Side = Literal["ours", "stock"]


def profile_steps(
    plan: Plan, side: Side, *, batches: tuple[int, ...], context: int, steps: int, timeout_s: float
) -> ProfiledSteps:
    """Profile decode steps in a process of its own.

    Args:
        plan: for one GPU.
        side: "ours" follows the plan; "stock" is vLLM without the plugin, with the arguments that the user gave.
        batches: sequences decoded together, one profile each.
        context: tokens of each sequence.
        steps: counted steps.
        timeout_s: for the whole process.

    Raises:
        UnsupportedError: the plan is not for one GPU: only there one process holds the whole model.
        ServerFailedError: the process ended without a result, or took too long.
    """
    if plan.num_gpus != 1 or plan.group is not None:
        raise UnsupportedError(f"the ledger of a decode step needs a plan for one GPU, got one for {plan.num_gpus}")
    with tempfile.TemporaryDirectory(prefix="moe-optimizer-step-") as name:
        folder = Path(name)
        arguments = plan.serve_args if side == "ours" else plan.plain_args
        request = StepsRequest(
            model=plan.model.path,
            serve_args=arguments.words,
            batches=batches,
            context=context,
            steps=steps,
            result=str(folder / "result.json"),
        )
        (folder / "request.json").write_text(json.dumps(encode(request)), encoding="utf-8")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MOE_OPTIMIZER_")}
        if side == "ours":
            (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
            environment |= {**plan.serve_env, "MOE_OPTIMIZER_PLAN": str(folder / "plan.json")}
        _run(folder, environment, timeout_s)
        text = (folder / "result.json").read_text(encoding="utf-8")
        return decode(ProfiledSteps, json.loads(text), origin="profiled steps")


def _run(folder: Path, environment: dict[str, str], timeout_s: float) -> None:
    module = "moe_optimizer.measure.decode_step.profiled_steps"
    command = [sys.executable, "-m", module, str(folder / "request.json")]
    log = folder / "log.txt"
    with (
        log.open("wb") as output,
        child_process(command, grace_s=_GRACE_S, stdout=output, stderr=subprocess.STDOUT, env=environment) as child,
    ):
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ServerFailedError(f"decode steps are not profiled after {timeout_s:.0f} s") from None
    if code or not (folder / "result.json").is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:]
        raise ServerFailedError(printable(f"decode steps are not profiled: exit {code}: {' / '.join(lines)}"[:2000]))
