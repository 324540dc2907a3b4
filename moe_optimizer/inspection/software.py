"""Reads what is installed here: vLLM, our kernels and their speeds, optional packages, tuned configurations."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping

from moe_optimizer.inspection import front_end, kernel_inventory, kernel_speeds, links, vllm_installation, vllm_runs
from moe_optimizer.inspection.tuned_configs import FOLDER_VARIABLE, user_folder
from moe_optimizer.specs.software import SoftwareSpec

OPTIONAL_PACKAGES = ("arctic_inference", "deep_ep", "lmcache", "transformer_engine")
"""Modules that some passes need; `SoftwareSpec` has a field of each name."""

_KERNEL_WORDS = ("MOE", "DEEP_GEMM", "BATCH_INVARIANT", "SGL_KERNEL")
"""Parts of the names of vLLM's variables that change which kernel computes the experts."""
_SET_BY_VLLM = ("VLLM_USE_DEEP_GEMM_E8M0",)
"""vLLM sets it in its own processes for some models, so that it would tell two ways of starting apart; Triton's experts
do not depend on it."""
_ONE_API_SERVER = ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_USE_RUST_FRONTEND")
_BINDING, _RESERVED = "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU"


def read_software() -> SoftwareSpec:
    """Return what is installed here, without importing any of it."""
    vllm = vllm_installation.find_vllm()
    reserved = os.environ.get(_RESERVED, "")
    return SoftwareSpec(
        vllm=vllm,
        kernels=kernel_inventory.read_kernel_inventory(),
        kernel_speeds=kernel_speeds.read_kernel_speeds(),
        front_end=front_end.read_front_end(vllm.version if vllm else ""),
        links=links.read_links(),
        vllm_runs=vllm_runs.read_vllm_runs(),
        tuned_configs=str(user_folder(vllm.version if vllm else "", os.environ)),
        tuned_configs_by_variable=bool(os.environ.get(FOLDER_VARIABLE)),
        torch=_version("torch"),
        triton=_version("triton"),
        kernel_environment=kernel_environment(os.environ),
        deep_gemm_e8m0=os.environ.get(_SET_BY_VLLM[0], ""),
        core_binding=os.environ.get(_BINDING) or "auto",
        reserved_cores=int(reserved) if reserved.isdecimal() else None,
        one_api_server=one_api_server(os.environ),
        **{name: importlib.util.find_spec(name) is not None for name in OPTIONAL_PACKAGES},
    )


def one_api_server(environ: Mapping[str, str]) -> str:
    """Return the variable that is set and with which vLLM has one API server; "" where none is."""
    return next((name for name in _ONE_API_SERVER if _is_on(environ.get(name, ""))), "")


def kernel_environment(environ: Mapping[str, str]) -> str:
    """Return the variables that change which kernel of vLLM computes the experts, as "NAME=VALUE NAME=VALUE"."""
    named = {name for name in environ if name.startswith("VLLM_") and any(word in name for word in _KERNEL_WORDS)}
    names = sorted(named.difference(_SET_BY_VLLM))
    return " ".join(f"{name}={environ[name]}" for name in names)


def _is_on(value: str) -> bool:
    return value.strip().lower() in ("1", "true")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
