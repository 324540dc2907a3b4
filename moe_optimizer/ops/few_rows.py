"""A product of few rows with a matrix on CPUs: what a decode of a few requests takes its time for.

torch's own product of one row reads the matrix at two thirds of the speed at which memory can be read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_optimizer.ops import _load

MOST_ROWS = 8
"""Most rows of x; more are the business of a product that keeps parts of both in the caches."""


def product(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, isa: str = "") -> Tensor | None:
    """Return x @ weight.T + bias, for up to `MOST_ROWS` rows of x.

    None, with nothing done, where torch has to do it: more rows, another device, a graph that is traced, no compiled
    module, a torch before 2.10, shapes or dtypes that do not fit each other, a last dimension that is not contiguous.

    Args:
        x_TK: float32, bfloat16 or float16.
        weight_NK: of x's dtype; rows may be any distance apart.
        bias_N: of x's dtype.
        isa: forces a lesser instruction set than this machine's best; tests compare them.

    Numerics: float32 throughout, rounded once to the dtype of x. The bits of a row depend neither on the other rows nor
    on the number of threads; they are not those of torch.
    """
    if not x_TK.is_cpu or x_TK.dim() != 2 or len(x_TK) > MOST_ROWS or torch.compiler.is_compiling():
        return None
    if (calls := _load.calls("FewRowCalls")) is None:
        return None
    out_TN = torch.empty(len(x_TK), len(weight_NK), dtype=x_TK.dtype)
    return out_TN if calls.multiply(x_TK, weight_NK, bias_N, out_TN, isa) else None
