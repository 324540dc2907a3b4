"""Repeats calls of the CPU experts: what was checked for a layer once is not checked and described again.

Checking and describing the tensors of a call takes longer than the experts of a small layer. All that it depends on is
in a key of addresses, shapes, strides and types, which is read anew in every call: an equal key is an equal call but
for the number of tokens and the addresses of what belongs to them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import _load
from moe_optimizer.ops.expert_inputs import Inputs
from moe_optimizer.ops.kernel_arguments import Fields

_MOST = 4096
"""Chosen: more layers and kinds of calls than a process has; beyond, everything is forgotten once."""
_known: dict[tuple[Any, ...], Fields] = {}


def again(inputs: Inputs, out: Tensor) -> bool:
    """Compute a call that only differs from a remembered one in its tokens; False: there is none, nothing was done.

    Raises:
        TensorContractError: an id in topk_ids names no expert.
    """
    tokens = inputs.x.shape[0] if inputs.x.dim() == 2 else 0
    fields = _known.get(_key(inputs, out)) if tokens else None
    if fields is None:
        return False
    x_address, out_address = inputs.x.data_ptr(), out.data_ptr()
    if x_address != out_address:
        # Shifted over each other, which the kernels cannot do in place: as `overlaps_shifted`.
        row_bytes = inputs.x.element_size()
        x_bytes = row_bytes * tokens * fields["x_stride"]
        out_bytes = row_bytes * tokens * fields["out_stride"]
        if x_address < out_address + out_bytes and out_address < x_address + x_bytes:
            return False
    changed = {
        "num_tokens": tokens,
        "x": x_address,
        "out": out_address,
        "topk_weights": inputs.topk_weights.data_ptr(),
        "topk_ids": inputs.topk_ids.data_ptr(),
    }
    enqueue(fields | changed, "")
    return True


def remember(inputs: Inputs, out: Tensor, fields: Fields) -> None:
    """Keep the description of a call that was checked and whose tensors the kernels read as they are."""
    if len(_known) >= _MOST:
        _known.clear()
    if inputs.x.shape[0]:
        _known[_key(inputs, out)] = fields


def enqueue(fields: Fields, isa: str) -> None:
    """Run the kernel.

    Raises:
        TensorContractError: an id in topk_ids names no expert.
    """
    try:
        _load.kernels().fused_experts(fields, isa)
    except ValueError as error:
        raise TensorContractError(f"fused_experts: {error}") from None


def _key(inputs: Inputs, out: Tensor) -> tuple[Any, ...]:
    """Return everything that the checks and the description of a call depend on, but for its number of tokens."""
    x, w13, w2, weights, ids, expert_map, w13_scale, w2_scale, w13_bias, w2_bias, activation = inputs
    rows = x.shape[0]
    return (
        *((tensor.shape[1:], tensor.stride(), tensor.dtype, tensor.device) for tensor in (x, out, weights, ids)),
        out.shape[0] == rows == weights.shape[0] == ids.shape[0],
        activation,
        *(
            None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            for tensor in (w13, w2, expert_map, w13_scale, w2_scale, w13_bias, w2_bias)
        ),
    )
