"""Finds and imports the compiled extension module, and says why where it cannot."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from moe_optimizer.errors import KernelUnavailableError
from moe_optimizer.log import get_logger

_MODULE = "moe_optimizer.ops._kernels"
_BUILD_HINT = "run: bash build.sh"

_log = get_logger(__name__)


@functools.cache
def import_kernels() -> tuple[ModuleType | None, str]:
    # torch first: the module then binds to the OpenMP runtime that torch has loaded. Loaded before torch it
    # would bring the system's, and two runtimes would each start a full set of threads.
    import torch  # noqa: F401

    try:
        return importlib.import_module(_MODULE), ""
    except ModuleNotFoundError as error:
        if error.name != _MODULE:
            raise
        return None, _why_not_found()
    except ImportError as error:
        return None, f"kernels not loadable: {error}"


def _why_not_found() -> str:
    others = sorted(path.name for path in Path(__file__).parent.glob("_kernels*.so"))
    if others:
        return f"kernels built for another Python: found {', '.join(others)}, this is {sys.implementation.cache_tag}"
    return "kernels not built"


def kernels_available() -> tuple[bool, str]:
    """Return whether the compiled kernels can be used in this process, and the reason if not ("" if so)."""
    module, reason = import_kernels()
    return module is not None, reason


def kernels() -> ModuleType:
    """Return the extension module.

    Raises:
        KernelUnavailableError: it is not built, or not loadable here; the message says which.
    """
    module, reason = import_kernels()
    if module is None:
        raise KernelUnavailableError(reason, hint=_BUILD_HINT)
    return module


@functools.cache
def calls(name: str) -> Any:
    """Return the compiled class `name` for torch's tensors, which it reads itself.

    None where it cannot: the module is not built, or torch hands tensors out in another way than from 2.10 on.
    """
    import torch

    module, _ = import_kernels()
    try:
        return None if module is None else getattr(module, name)(torch.Tensor)
    except ValueError:
        return None


def best_isa() -> str:
    """Return the instruction set the CPU kernels use here: avx512_bf16, avx512, avx2 or generic.

    Raises:
        KernelUnavailableError: the kernels are not built.
    """
    return kernels().best_isa()


@functools.cache
def warn_of_reference(op: str, reason: str) -> None:
    """Warn, once per reason, that an op runs in plain torch."""
    _log.warning("%s runs in plain torch: %s", op, reason)
