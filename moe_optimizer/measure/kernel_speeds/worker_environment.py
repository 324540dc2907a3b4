"""Makes the environment in which kernels are measured as a server's worker runs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

_OPENMP = ("libgomp", "libiomp", "libomp")


def worker_environment(environ: Mapping[str, str], plan_env: Mapping[str, str], cores: Sequence[int]) -> dict[str, str]:
    """Return the environment of a measuring process.

    Args:
        environ: of the server, without the plan's variables. Those of this package are left out, so that the plugin
            does nothing: the kernels are measured as they are, beside those of stock vLLM.
        plan_env: the plan's variables.
        cores: of the CPU worker; () on GPUs.
    """
    kept = {key: value for key, value in environ.items() if not key.startswith("MOE_OPTIMIZER_")}
    environment = kept | dict(plan_env)
    return environment | _bound(environment, cores) if cores else environment


def _bound(environ: Mapping[str, str], cores: Sequence[int]) -> dict[str, str]:
    """Return how vLLM's CPU build starts a worker on these cores: libraries loaded first, and one thread to a core."""
    preloaded = [path for path in environ.get("LD_PRELOAD", "").split(":") if path]
    if not any(name in path for path in preloaded for name in _OPENMP):
        preloaded += _first("torch", "../torch.libs/libgomp*.so*", "lib/libgomp*.so*")
    if not any("libtcmalloc" in path for path in preloaded):
        preloaded = [*_first("vllm", "libs/libtcmalloc_minimal*.so*", "libs/libtcmalloc.so*"), *preloaded]
    numbers = [str(core) for core in cores]
    bound = {"OMP_NUM_THREADS": str(len(numbers)), "LD_PRELOAD": ":".join(preloaded)}
    loaded = bound["LD_PRELOAD"]
    if "libiomp" in loaded or "libomp" in loaded:
        return bound | {"KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(numbers)}]"}
    if "libgomp" in loaded:
        return bound | {"GOMP_CPU_AFFINITY": " ".join(numbers)}
    return bound | {"OMP_PLACES": f"{{{','.join(numbers)}}}", "OMP_PROC_BIND": "true"}


def _first(package: str, *patterns: str) -> list[str]:
    """Return the first file of a package that one of the patterns names, in a list; [] where there is none."""
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for pattern in patterns:
            parent, _, name = pattern.rpartition("/")
            paths = sorted((Path(folder) / parent).resolve().glob(name))
            if paths:
                return [str(paths[0])]
    return []
