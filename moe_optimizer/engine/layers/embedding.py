"""`Embedding`: token ids to vectors, and with tied weights vectors to logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_optimizer.engine.layers.layer import Layer


class Embedding(Layer):
    """One vector per token of the vocabulary."""

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the vectors of the tokens."""
        return F.embedding(token_ids, self.weight)
