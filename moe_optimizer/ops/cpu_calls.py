"""Repeats calls of the CPU experts: what was checked for a layer once is not checked and described again.

Checking and describing the tensors of a call takes longer than the experts of a small layer. All that it depends on is
in a key of addresses, shapes, strides and types, which the compiled module reads anew in every call: an equal key is an
equal call but for the number of tokens and the addresses of what belongs to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import _load
from moe_optimizer.ops.expert_inputs import Inputs
from moe_optimizer.ops.kernel_arguments import Fields

Zeros = tuple[Tensor | None, ...]
AnyInputs = Inputs | tuple[Tensor | str | None, ...]
"""`Inputs`, or a plain tuple of the same, which takes a third of the time to make."""


def known() -> Any:
    """Return the calls that are remembered: `KnownCalls` of the compiled module.

    None where it cannot read tensors (`_load.calls`): every call is then checked and described.
    """
    return _load.calls("KnownCalls")


def again(inputs: AnyInputs, out: Tensor, zeros: Zeros = ()) -> bool:
    """Compute a call that only differs from a remembered one in its tokens; False: there is none, nothing was done.

    Args:
        inputs: of the call; with INT4 weights their codes and scales.
        out: of the call.
        zeros: the zero points of INT4 weights, which may be None both; nothing for other weights.

    Raises:
        TensorContractError: an id in topk_ids names no expert.
    """
    calls = known()
    try:
        return calls is not None and calls.again(inputs, out, zeros)
    except ValueError as error:
        raise _no_expert(error, zeros) from None


def again_from_logits(inputs: Inputs, out: Tensor, logits: Tensor, top_k: int, *, renormalize: bool) -> bool:
    """Do as `again` with the routing that a softmax of the logits gives, without groups or a bias.

    Args:
        inputs: of the call, whose `topk_weights` and `topk_ids` are not read.
        out: as `again` gets it.
        logits: [T, experts].
        top_k: experts of a token.
        renormalize: make their weights sum to 1.

    Raises:
        TensorContractError: an expert of the map is none of the weights'.
    """
    calls = known()
    try:
        return calls is not None and calls.again_from_logits(inputs, out, logits, top_k, renormalize)
    except ValueError as error:
        raise _no_expert(error) from None


def remember(inputs: Inputs, out: Tensor, *described: Fields, zeros: Zeros = ()) -> None:
    """Keep the description of a call that was checked and whose tensors the kernels read as they are.

    Args:
        inputs: as `again` gets them.
        out: likewise.
        described: `FusedExpertsArgs`; with INT4 weights then the `Int4Scales` of both.
        zeros: as `again` gets them.
    """
    calls = known()
    if calls is not None:
        calls.remember(inputs, out, zeros, *described)


def enqueue(fields: Fields, isa: str) -> None:
    """Run the kernel.

    Raises:
        TensorContractError: an id in topk_ids names no expert.
    """
    try:
        _load.kernels().fused_experts(fields, isa)
    except ValueError as error:
        raise _no_expert(error) from None


def _no_expert(error: ValueError, zeros: Sequence[Any] = ()) -> TensorContractError:
    return TensorContractError(f"{'int4_experts' if zeros else 'fused_experts'}: {error}")
