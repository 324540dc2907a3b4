"""Keeps for which requests of a warm-up kernels were needed, and which kernels its caches held at the end.

A start of the same plan then has to send only these, as long as the caches still hold all of that: what the other
requests need was needed by one of these before, and is in the process again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping

from moe_optimizer import __version__
from moe_optimizer.errors import InputError
from moe_optimizer.files import read_json, write_atomically
from moe_optimizer.inspection.compiler_caches import cache_folders, cached_kernels
from moe_optimizer.launcher.compile_caches import compiler_versions
from moe_optimizer.launcher.warm_up import WarmUpResult
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.json_codec import encode
from moe_optimizer.plan.plan import Plan
from moe_optimizer.resources import cache_dir

_OTHER_ARGUMENTS = (
    "--host",
    "--port",
    "--uds",
    "--api-key",
    "--served-model-name",
    "--shutdown-timeout",
    "--middleware",
)
"""Arguments of a server that no kernel depends on."""
_COMPILERS = ("VLLM_", "TORCH", "TRITON_", "DG_", "FLASHINFER_", "CUDA_")
"""How variables begin that choose kernels, or say how and where they are compiled."""
_OTHER_VARIABLES = ("VLLM_API_KEY", "VLLM_HOST_IP", "VLLM_PORT", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Those of them that no kernel depends on: what a GPU is and how many there are is in the key by itself."""
_MADE_AGAIN = ("Inductor",)
"""Libraries whose code belongs to graphs that every process compiles anew, so that the request for it is always sent.
All servers of a machine share this folder, in a place for temporary files.
"""
_MOST_BYTES = 16 << 20


class WarmUpMemory:
    """What an earlier start has left for one like it.

    Args:
        plan: of one server on this machine.
        environ: of that server.
        requests: names of all requests of its warm-up.
    """

    def __init__(self, plan: Plan, environ: Mapping[str, str], requests: Iterable[str]) -> None:
        self._caches = {name: each for name, each in cache_folders(environ).items() if name not in _MADE_AGAIN}
        named = {name for name in environ if name.startswith(_COMPILERS)} - {*_OTHER_VARIABLES}
        variables = sorted((name, environ[name]) for name in named)
        key = [__version__, compiler_versions(plan), _what_kernels_depend_on(plan), variables, list(requests)]
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        self._path = cache_dir(os.environ) / "start_up" / f"{name}.warm.json"

    def known(self) -> tuple[frozenset[str] | None, str]:
        """Return the names of the requests for which kernels were needed; None where nothing is known of an earlier
        start, or kernels are gone that it has left, and in words which of both.
        """
        try:
            kept = read_json(self._path, max_bytes=_MOST_BYTES)
            needed, kernels = frozenset(map(str, kept["needed"])), set(kept["kernels"])
        except (InputError, KeyError, TypeError):
            return None, "no start like it before"
        if gone := sorted(kernels.difference(cached_kernels(self._caches))):
            return None, f"{len(gone)} kernels of the start before are gone, such as {gone[0]}"
        return needed, ""

    def keep(self, result: WarmUpResult) -> None:
        """Note how a warm-up ended; of one that did not settle nothing is known."""
        with contextlib.suppress(OSError):
            if result.settled:
                kept = {"needed": sorted(result.needed), "kernels": sorted(cached_kernels(self._caches))}
                write_atomically(self._path, json.dumps(kept))
            else:
                self._path.unlink(missing_ok=True)


def _what_kernels_depend_on(plan: Plan) -> object:
    """Return what of a plan chooses kernels, as JSON values: reasons and sizes of memory may differ between starts."""
    gpu, cpu = plan.hardware.gpu, plan.hardware.cpu
    return {
        "machine": [gpu and gpu.name, plan.hardware.driver_version, plan.hardware.cuda_version, plan.num_gpus],
        "processor": None if gpu or cpu is None else [cpu.name, cpu.cores, list(cpu.isa)],
        "model": encode(dataclasses.replace(plan.model, warnings=())),
        "arguments": list(plan.serve_args.without(*_OTHER_ARGUMENTS).words),
        "passes": {each.pass_name: encode(each.params) for each in plan.decisions if each.status is Status.ON},
    }
