"""Repeats calls of the CPU experts: what was checked for a layer once is not checked and described again.

Checking and describing the tensors of a call takes longer than the experts of a small layer. All that it depends on is
in a key of addresses, shapes, strides and types, which is read anew in every call: an equal key is an equal call but
for the number of tokens and the addresses of what belongs to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import _load
from moe_optimizer.ops.expert_inputs import Inputs
from moe_optimizer.ops.kernel_arguments import Fields

Zeros = Sequence[Tensor | None]
_MOST = 4096
"""Chosen: more layers and kinds of calls than a process has; beyond, everything is forgotten once."""
_known: dict[tuple[Any, ...], tuple[Any, int, int]] = {}
"""Key -> what runs the call again, and the bytes between the tokens of x and of out."""


def again(inputs: Inputs, out: Tensor, zeros: Zeros = ()) -> bool:
    """Compute a call that only differs from a remembered one in its tokens; False: there is none, nothing was done.

    Args:
        inputs: of the call; with INT4 weights their codes and scales.
        out: of the call.
        zeros: the zero points of INT4 weights, which may be None both; nothing for other weights.

    Raises:
        TensorContractError: an id in topk_ids names no expert.
    """
    x = inputs.x
    shape = x.shape
    tokens = shape[0] if len(shape) == 2 else 0
    known = _known.get(_key(inputs, out, zeros)) if tokens else None
    if known is None:
        return False
    call, x_bytes, out_bytes = known
    x_address, out_address = x.data_ptr(), out.data_ptr()
    # Shifted over each other, which the kernels cannot do in place: as `overlaps_shifted`.
    if x_address != out_address and (
        x_address < out_address + tokens * out_bytes and out_address < x_address + tokens * x_bytes
    ):
        return False
    try:
        call.run(tokens, x_address, out_address, inputs.topk_weights.data_ptr(), inputs.topk_ids.data_ptr())
    except ValueError as error:
        raise _no_expert(error, zeros) from None
    return True


def remember(inputs: Inputs, out: Tensor, *described: Fields, zeros: Zeros = ()) -> None:
    """Keep the description of a call that was checked and whose tensors the kernels read as they are.

    Args:
        inputs: as `again` gets them.
        out: likewise.
        described: `FusedExpertsArgs`; with INT4 weights then the `Int4Scales` of both.
        zeros: as `again` gets them.
    """
    if len(_known) >= _MOST:
        _known.clear()
    if inputs.x.shape[0]:
        x_bytes, out_bytes = (tensor.stride(0) * tensor.element_size() for tensor in (inputs.x, out))
        _known[_key(inputs, out, zeros)] = _load.kernels().FusedExpertsAgain(*described), x_bytes, out_bytes


def enqueue(fields: Fields, isa: str) -> None:
    """Run the kernel.

    Raises:
        TensorContractError: an id in topk_ids names no expert.
    """
    try:
        _load.kernels().fused_experts(fields, isa)
    except ValueError as error:
        raise _no_expert(error) from None


def _no_expert(error: ValueError, zeros: Zeros = ()) -> TensorContractError:
    return TensorContractError(f"{'int4_experts' if zeros else 'fused_experts'}: {error}")


def _key(inputs: Inputs, out: Tensor, zeros: Zeros) -> tuple[Any, ...]:
    """Return everything that the checks and the description of a call depend on, but for its number of tokens."""
    x, w13, w2, weights, ids, expert_map, w13_scale, w2_scale, w13_bias, w2_bias, activation = inputs
    shape, slots = x.shape, ids.shape
    rows, hidden = shape
    # Written out, and nothing is asked of what is not there: this is most of what a repeated call costs.
    return (
        w13.data_ptr(), w13.shape, w13.stride(), w13.dtype,
        w2.data_ptr(), w2.shape, w2.stride(), w2.dtype,
        hidden, x.stride(), x.dtype, x.is_cpu,
        out.shape == shape, out.stride(), out.dtype, out.is_cpu,
        slots[1:], ids.stride(), ids.dtype, ids.is_cpu, slots[0] == rows,
        weights.shape == slots, weights.stride(), weights.dtype, weights.is_cpu,
        activation,
        None if expert_map is None else _constant(expert_map),
        None if w13_scale is None else _constant(w13_scale),
        None if w2_scale is None else _constant(w2_scale),
        None if w13_bias is None else _constant(w13_bias),
        None if w2_bias is None else _constant(w2_bias),
        *[None if zero is None else _constant(zero) for zero in zeros],
    )  # fmt: skip


def _constant(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
