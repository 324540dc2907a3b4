"""Compiles the small operations between the matrix products with torch.compile, each chain of them into one kernel."""

from __future__ import annotations

import torch
from torch import nn


def compile_layers(model: nn.Module) -> None:
    """Compile the methods that layers name in `fused_methods`.

    A chain in one kernel rounds to the model's dtype once instead of after each operation.
    """
    for module in model.modules():
        for name in getattr(module, "fused_methods", ()):
            setattr(module, name, torch.compile(getattr(module, name), dynamic=True))
