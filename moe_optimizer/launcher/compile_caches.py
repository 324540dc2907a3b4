"""Names the folders in which a server keeps the kernels that it compiles, so that the next start finds them.

torch.compile's are where vLLM keeps them (VLLM_CACHE_ROOT), under a hash of its configuration and versions.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

from moe_optimizer.plan.plan import Plan
from moe_optimizer.resources import cache_dir

_FOLDERS = {"TRITON_CACHE_DIR": "triton", "DG_JIT_CACHE_DIR": "deep_gemm"}
"""Variable of Triton and DeepGEMM -> its folder below ours. vLLM before 0.32 sets Triton's itself."""
_VERSIONS = ("torch", "triton")


def compile_caches(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a server on GPUs, as far as `environ` does not set them."""
    if not plan.num_gpus:
        return {}
    root = cache_dir(environ) / "compiled" / compiler_versions(plan)
    return {name: str(root / folder) for name, folder in _FOLDERS.items() if not environ.get(name)}


def graph_cache(server: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with which vLLM keeps the graphs that this server compiles apart from those of others.

    Servers of equal configuration share a folder and each other's file names, which vLLM tells apart by the ranks
    inside a server only. Those that start at once, with nothing there yet, write the same files at the same time.
    """
    root = environ.get("VLLM_CACHE_ROOT") or Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm"
    return {"VLLM_CACHE_ROOT": str(Path(root) / server)}


def compiler_versions(plan: Plan) -> str:
    """Return the versions on which compiled kernels depend, as a folder is called."""
    return "_".join([f"vllm-{plan.vllm_version or 'unknown'}", *map(_with_version, _VERSIONS)])


def _with_version(name: str) -> str:
    try:
        return f"{name}-{importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name}-none"
