"""`uploaded`: a tensor of the host on the device."""

import torch
from torch import Tensor


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device; the host goes on where that is a GPU, which still computes what came before."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
