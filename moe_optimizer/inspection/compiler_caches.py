"""Finds the folders in which compilers keep kernels, and lists what is there: what is new was compiled meanwhile."""

from __future__ import annotations

import getpass
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

Caches = Mapping[str, tuple[Path, str]]
"""Library -> its folder, and the pattern of a kernel in it."""

UNSEEN = ("DeepGEMM", "FlashInfer")
"""Libraries that tell nobody what they compile: only the folder shows it."""


def cache_folders(environ: Mapping[str, str]) -> dict[str, tuple[Path, str]]:
    """Return where libraries keep the kernels that they compile for a process with this environment."""
    home = Path.home()
    root = Path(environ.get("VLLM_CACHE_ROOT") or Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "vllm")
    deep_gemm = Path(environ.get("DG_JIT_CACHE_DIR") or root / "deep_gemm")
    flashinfer = Path(environ.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer"
    triton = Path(environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    inductor = environ.get("TORCHINDUCTOR_CACHE_DIR")
    return {
        "DeepGEMM": (deep_gemm, "cache/*"),
        "FlashInfer": (flashinfer, "**/cached_ops/*/*.so"),
        "Triton": (triton, "*"),
        "Inductor": (
            Path(inductor) if inductor else Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}",
            "*/*.py",
        ),
        # vLLM gives both folders of their own for the graphs of a model.
        "vLLM's Inductor": (root / "torch_compile_cache", "**/inductor_cache/*/*.py"),
        "vLLM's Triton": (root / "torch_compile_cache", "**/triton_cache/*"),
    }


def cached_kernels(folders: Caches) -> Iterator[str]:
    """Yield "LIBRARY kernel NAME" for each kernel in the caches."""
    for library, (folder, pattern) in folders.items():
        for path in folder.glob(pattern):
            yield f"{library} kernel {path.stem if path.suffix == '.so' else path.name}"
