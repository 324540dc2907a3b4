"""The attention layer of a few decoding tokens in one call on CPUs.

One by one its steps take Python longer than a small layer's work, and longest where the weights that are read push
Python's own memory out of the caches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_optimizer.ops import _load
from moe_optimizer.ops.few_rows import MOST_ROWS

Affine = tuple[Tensor, Tensor | None]
"""Weight [outputs, inputs] and bias [outputs] of a projection."""


Places = tuple[Tensor, Tensor, Tensor, Tensor]
"""The cache [2, blocks, block size, K, d]; the slots int64 [T] in it, block * block size + place in the block, of the
tokens' keys and values; block tables int32 [T, N] and context lengths int64 [T], as `ops.paged_attention` gets them."""


def computed(
    x_TC: Tensor, qkv: Affine, o: Affine, rope: tuple[Tensor, Tensor], places: Places,
    *, norms: tuple[Tensor, Tensor] | None, eps: float,
) -> Tensor | None:  # fmt: skip
    """Return o(attention(turned(normed(qkv(x))))) of one token of each of T sequences; store its keys and values.

    None where the steps have to be taken one by one: other dtypes than float32, more than `few_rows.MOST_ROWS` tokens,
    and where `few_rows.product`, `token_rows` or `paged_attention` compute nothing. Keys and values may be stored then.

    Args:
        x_TC: float32.
        qkv: rows of queries [H d], then keys and values [K d] each.
        o: of the output projection, [C, H d].
        rope: cosines and sines, [T, 1, d] each.
        places: where keys and values go, and what each token attends to.
        norms: weights [d] of the heads' norms of queries and keys, if the model has them.
        eps: of the norms.

    Numerics: those of the steps, bit for bit.
    """
    if x_TC.dtype is not torch.float32 or not x_TC.is_cpu or len(x_TC) > MOST_ROWS or torch.compiler.is_compiling():
        return None
    if (calls := _load.calls("DecodeCalls")) is None:
        return None
    out_TC = torch.empty(len(x_TC), len(o[0]))
    done = calls.attention(x_TC, *qkv, *(norms or (None, None)), eps, *rope, *places, *o, out_TC)
    return out_TC if done else None
