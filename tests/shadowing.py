"""A folder whose files have the names of what we import: executed, each leaves a file."""

from __future__ import annotations

from pathlib import Path

NAMES = (
    "torch", "yaml", "vllm", "vllm_router", "pydantic", "typer", "rich", "numpy", "psutil", "pynvml", "huggingface_hub",
    "transformers", "safetensors", "prometheus_client", "triton", "uvloop", "json", "logging", "tempfile",
)  # fmt: skip
"""The standard library's are among those that Python has not imported before the first line of ours."""


def lay(folder: Path) -> Path:
    """Fill the folder with modules of these names; return the folder in which executed ones leave a file."""
    executed = folder / "executed"
    executed.mkdir(parents=True)
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(executed / name)!r}, 'w').close()\n", encoding="utf-8")
    return executed
