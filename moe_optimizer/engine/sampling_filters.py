"""`SamplingFilters`: temperature, top-k, top-p and min-p of a batch, as tensors.

Legend: S sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optimizer.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingFilters:
    """A filter that no sequence uses is None and costs nothing."""

    temperature_S1: Tensor
    scheduled: bool
    """Whether a temperature changes with the number of tokens."""
    top_k_S: Tensor | None
    top_p_S1: Tensor | None
    min_p_S1: Tensor | None

    @classmethod
    def of(cls, params: list[SamplingParams], device: torch.device) -> SamplingFilters:
        """Return the filters of a batch."""
        every = 1 << 31

        def column(values: list[float], neutral: float) -> Tensor | None:
            return torch.tensor(values, device=device) if any(value != neutral for value in values) else None

        top_k = column([each.top_k if each.top_k > 0 else every for each in params], every)
        top_p = column([float(each.top_p) for each in params], 1.0)
        min_p = column([float(each.min_p) for each in params], 0.0)
        return cls(
            temperature_S1=torch.tensor([float(each.temperature) for each in params], device=device)[:, None],
            scheduled=any(each.temperature_schedule for each in params),
            top_k_S=top_k,
            top_p_S1=None if top_p is None else top_p[:, None],
            min_p_S1=None if min_p is None else min_p[:, None],
        )

    def apply(self, scores_SV: Tensor) -> Tensor:
        """Return the scores with minus infinity for every token that a filter leaves out."""
        if self.min_p_S1 is not None:
            floor = scores_SV.amax(-1, keepdim=True) + self.min_p_S1.log()
            scores_SV = scores_SV.masked_fill(scores_SV < floor, float("-inf"))
        if self.top_k_S is not None:
            scores_SV = _top_k(scores_SV, self.top_k_S)
        if self.top_p_S1 is not None:
            scores_SV = _top_p(scores_SV, self.top_p_S1)
        return scores_SV


def _top_k(scores_SV: Tensor, top_k_S: Tensor) -> Tensor:
    size = scores_SV.shape[-1]
    largest = int(top_k_S.where(top_k_S < size, 0).max())
    if not largest:
        return scores_SV
    sorted_SK = scores_SV.topk(largest, dim=-1).values
    kth_S1 = sorted_SK.gather(1, (top_k_S.clamp(max=largest) - 1)[:, None])
    limit_S1 = torch.where((top_k_S < size)[:, None], kth_S1, float("-inf"))
    return scores_SV.masked_fill(scores_SV < limit_S1, float("-inf"))


def _top_p(scores_SV: Tensor, top_p_S1: Tensor) -> Tensor:
    sorted_SV, order_SV = scores_SV.sort(dim=-1, descending=True)
    probs_SV = sorted_SV.softmax(-1)
    # A token is left out if those before it reach top_p without it; the first never is.
    left_out = (probs_SV.cumsum(-1) - probs_SV >= top_p_S1) & (top_p_S1 < 1)
    left_out[:, 0] = False
    return sorted_SV.masked_fill(left_out, float("-inf")).gather(1, order_SV.argsort(-1))
