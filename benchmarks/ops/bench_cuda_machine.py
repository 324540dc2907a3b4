"""Says why the CUDA kernels cannot run on this machine, where they cannot."""

from __future__ import annotations


def why_not_here() -> str:
    """Return why they cannot, "" where they can."""
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA GPU: torch sees none"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs compute capability 9.0 (H100, H200), got {capability[0]}.{capability[1]}"
    return ""
