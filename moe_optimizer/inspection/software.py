"""Reads what is installed here: vLLM, our kernels and their speeds, optional packages, tuned configurations."""

from __future__ import annotations

import importlib.util
import os

from moe_optimizer import inspection
from moe_optimizer.inspection.tuned_configs import FOLDER_VARIABLE, user_folder
from moe_optimizer.specs.software import SoftwareSpec

OPTIONAL_PACKAGES = ("deep_ep", "lmcache", "transformer_engine")
"""Modules that some passes need; `SoftwareSpec` has a field of each name."""


def read_software() -> SoftwareSpec:
    """Return what is installed here, without importing any of it."""
    vllm = inspection.find_vllm()
    return SoftwareSpec(
        vllm=vllm,
        kernels=inspection.read_kernel_inventory(),
        kernel_speeds=inspection.read_kernel_speeds(),
        vllm_runs=inspection.read_vllm_runs(),
        tuned_configs=str(user_folder(vllm.version if vllm else "", os.environ)),
        tuned_configs_by_variable=bool(os.environ.get(FOLDER_VARIABLE)),
        **{name: importlib.util.find_spec(name) is not None for name in OPTIONAL_PACKAGES},
    )
