"""The gate in plain torch: router logits to expert ids and weights. The kernels are tested against it."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops.kernel_arguments import SCORINGS

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_GROUPS = 32


def topk_router(
    router_logits: Tensor,
    *,
    top_k: int,
    renormalize: bool = True,
    scoring: str = "softmax",
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    score_bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the weights (float32) and ids (int32) [T, k] of the experts each token goes to, best first.

    scores  = softmax or sigmoid of the logits, in float32
    choice  = scores + score_bias; with groups, only experts of the `topk_group` best groups may be chosen. A
              group's score is its best choice, or with a bias the sum of its two best
    ids     = the k largest of choice; the lower id wins a tie
    weights = scores[ids], divided by their sum if `renormalize`, times `routed_scaling_factor`

    Args:
        router_logits: [T, E], float32, bfloat16 or float16.
        top_k: experts per token.
        renormalize: make the weights of a token sum to 1 (before the scaling factor).
        scoring: "softmax" or "sigmoid".
        num_expert_group: groups of neighbouring experts, or None.
        topk_group: groups kept per token; needed with groups.
        score_bias: float32 [E], added for the choice only.
        routed_scaling_factor: factor of the weights.

    Raises:
        TensorContractError: an argument is outside what it may be.
    """
    check_router(router_logits, top_k, scoring, num_expert_group, topk_group)
    scores = router_logits.float()
    scores = scores.softmax(-1) if scoring == "softmax" else scores.sigmoid()
    choice = scores if score_bias is None else scores + score_bias
    if num_expert_group is not None and topk_group is not None and num_expert_group > 1:
        groups = choice.unflatten(-1, (num_expert_group, choice.shape[-1] // num_expert_group))
        best = groups.topk(min(2 if score_bias is not None else 1, groups.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.sort(dim=-1, descending=True, stable=True).indices[..., :topk_group], True)
        choice = groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routed_scaling_factor, ids.int()


def check_router(
    router_logits: Tensor, top_k: int, scoring: str, num_expert_group: int | None, topk_group: int | None
) -> None:
    """Raise TensorContractError unless the router's arguments fit each other."""
    if router_logits.dim() != 2:
        raise _error("router_logits: dimensions", list(router_logits.shape), "2 ([T, E])")
    if router_logits.dtype not in LOGITS_DTYPES:
        expected = " or ".join(str(dtype) for dtype in LOGITS_DTYPES)
        raise _error("router_logits: dtype", router_logits.dtype, expected)
    num_experts = router_logits.shape[1]
    if not 1 <= top_k <= num_experts:
        raise _error("top_k", top_k, f"1 to {num_experts} (router_logits dim 1)")
    if scoring not in SCORINGS:
        raise _error("scoring", repr(scoring), " or ".join(SCORINGS))
    if num_expert_group is None and topk_group is not None:
        raise _error("topk_group", topk_group, "None without num_expert_group")
    if num_expert_group == 1 and topk_group not in (None, 1):
        raise _error("topk_group", topk_group, "None or 1 with one group")
    if num_expert_group is None or num_expert_group == 1:
        return
    if not 1 <= num_expert_group <= MAX_GROUPS or num_experts % num_expert_group:
        raise _error("num_expert_group", num_expert_group, f"a divisor of {num_experts}, at most {MAX_GROUPS}")
    if topk_group is None or not 1 <= topk_group <= num_expert_group:
        raise _error("topk_group", topk_group, f"1 to {num_expert_group}")
    if topk_group * (num_experts // num_expert_group) < top_k:
        offered = f"{topk_group} groups x {num_experts // num_expert_group} experts"
        raise _error("top_k", top_k, f"at most the {offered} that are kept")


def _error(what: str, got: object, expected: str) -> TensorContractError:
    return TensorContractError(f"topk_router: {what}: got {got}, expected {expected}")
