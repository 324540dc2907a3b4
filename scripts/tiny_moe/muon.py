"""Implements Muon, momentum with orthogonal updates, for stacks of weight matrices.

Source of the method and its constants: Keller Jordan and others, "Muon: an optimizer for hidden layers in neural
networks", 2024. Chosen over AdamW alone because at equal time on two cores it reaches a lower held-out loss here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic that sends singular values in (0, 1] to about 1 in _ITERATIONS rounds."""
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Takes parameters [..., rows, columns]; leading dimensions (the experts) are separate matrices."""

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override]
        """Apply the gradients in `.grad`. No closure: the loss is evaluated once per step."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["average"] = torch.zeros_like(weight)
                average = state["average"].lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(average, group["momentum"]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                rows, columns = weight.shape[-2:]
                weight.sub_(update, alpha=group["lr"] * math.sqrt(max(1.0, rows / columns)))


def orthogonal(matrices: Tensor) -> Tensor:
    """Singular vectors kept, singular values moved close to 1, by Newton-Schulz iteration. [..., rows, columns]."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # The norm bounds the largest singular value, and the iteration diverges above 1. The small term: an expert that
    # received no token has gradient 0.
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x
