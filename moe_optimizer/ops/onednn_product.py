"""A product with a matrix that lies in oneDNN's order, on CPUs: a large one takes half the time of torch's own."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_optimizer.errors import described
from moe_optimizer.log import get_logger
from moe_optimizer.ops.huge_pages import use_huge_pages

_log = get_logger(__name__)


def packed(weight_NK: Tensor) -> Tensor | None:
    """Return a copy of a matrix for `product`, on huge pages; None where torch has no oneDNN for its dtype here."""
    if not (torch.backends.mkldnn.is_available() and weight_NK.is_cpu) or weight_NK.dtype == torch.float16:
        return None
    try:
        # In bfloat16 torch's own product is oneDNN's then too, with the same bits.
        if weight_NK.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        copy = torch.ops.mkldnn._reorder_linear_weight(weight_NK, None)
        product(weight_NK[:1], copy)
    except (AttributeError, RuntimeError, TypeError) as error:
        # Both are for torch's own compiler: another torch may not have them, or in another form.
        _log.warning(
            "products take twice the time: torch %s has no oneDNN product as known: %s",
            torch.__version__,
            described(error),
        )
        return None
    use_huge_pages(copy)
    return copy


def product(x_TK: Tensor, packed_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, for the copy that `packed` made of the weight."""
    return torch.ops.mkldnn._linear_pointwise(x_TK, packed_NK, bias_N, "none", [], "")
