"""`uploaded` and `Download`: tensors between host and device, for which a host with a GPU does not wait."""

from collections.abc import Sequence

import torch
from torch import Tensor


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device; the host goes on where that is a GPU, which still computes what came before."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Download:
    """Copies of tensors in host memory, made once the device has computed them and before what it is given later."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # To pinned memory from a GPU.
        self._copies = [each.to("cpu", non_blocking=each.is_cuda) for each in tensors]
        self._made = next(
            (torch.cuda.current_stream(each.device).record_event() for each in tensors if each.is_cuda), None
        )

    def wait(self) -> list[Tensor]:
        """Return the copies when they are there."""
        if self._made is not None:
            self._made.synchronize()
        return self._copies
