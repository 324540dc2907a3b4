"""`SamplingFilters`: temperature, top-k, top-p and min-p of a batch, as tensors.

Legend: S sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_optimizer.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingFilters:
    """A filter that no sequence uses is None and costs nothing."""

    temperature_S1: Tensor
    scheduled: bool
    """Whether a temperature changes with the number of tokens."""
    top_k_S1: Tensor | None
    top_p_S1: Tensor | None
    min_p_S1: Tensor | None

    @classmethod
    def of(cls, params: list[SamplingParams], device: torch.device) -> SamplingFilters:
        """Return the filters of a batch."""

        def column(values: list[Any]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        return cls(
            temperature_S1=column([float(each.temperature) for each in params]),
            scheduled=any(each.temperature_schedule for each in params),
            top_k_S1=column([each.top_k for each in params]) if any(each.top_k > 0 for each in params) else None,
            top_p_S1=column([float(each.top_p) for each in params]) if any(each.top_p < 1 for each in params) else None,
            min_p_S1=column([float(each.min_p) for each in params]) if any(each.min_p > 0 for each in params) else None,
        )

    def apply(self, scores_SV: Tensor) -> Tensor:
        """Return the scores with minus infinity for every token that a filter leaves out."""
        if self.min_p_S1 is not None:
            floor = scores_SV.amax(-1, keepdim=True) + self.min_p_S1.log()
            scores_SV = scores_SV.masked_fill(scores_SV < floor, float("-inf"))
        if self.top_k_S1 is not None:
            scores_SV = _top_k(scores_SV, self.top_k_S1)
        if self.top_p_S1 is not None:
            scores_SV = _top_p(scores_SV, self.top_p_S1)
        return scores_SV


def _top_k(scores_SV: Tensor, top_k_S1: Tensor) -> Tensor:
    top_k_S1 = top_k_S1.clamp(max=scores_SV.shape[-1])
    best_SK = scores_SV.topk(int(top_k_S1.max()), dim=-1).values
    kth_S1 = best_SK.gather(1, top_k_S1.clamp(min=1) - 1)
    return scores_SV.masked_fill((scores_SV < kth_S1) & (top_k_S1 > 0), float("-inf"))


def _top_p(scores_SV: Tensor, top_p_S1: Tensor) -> Tensor:
    sorted_SV, order_SV = scores_SV.sort(dim=-1, descending=True)
    probs_SV = sorted_SV.softmax(-1)
    # A token is left out if those before it reach top_p without it; the first never is.
    left_out = (probs_SV.cumsum(-1) - probs_SV >= top_p_S1) & (top_p_S1 < 1)
    left_out[:, 0] = False
    return sorted_SV.masked_fill(left_out, float("-inf")).gather(1, order_SV.argsort(-1))
