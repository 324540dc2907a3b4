"""Codes of four bits, two in a byte, and the passes over a weight that is converted to them.

Legend: E experts, N output channels (rows), K input channels (columns) of one matrix.

Byte j of a packed row holds column 2j in its low half and 2j + 1 in its high half.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.specs.expert_formats import row_pitch

CODES_PER_BYTE = 2
# Chosen: the FP32 intermediate of one step, of which there are some ten.
CHUNK_ELEMENTS = 2 * 1024 * 1024


def pack_pairs(codes: Tensor) -> Tensor:
    """Return uint8 [.., K / 2] from codes [.., K] of any integer or floating dtype, 0 to 15."""
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, CODES_PER_BYTE))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack_pairs(packed: Tensor) -> Tensor:
    """Return the codes uint8 [.., K] of uint8 [.., K / 2]."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def rows_on_lines(packed: Tensor) -> Tensor:
    """Return uint8 [E, N, K / 2] with its rows `row_pitch` apart: itself where they are, else a copy.

    The bytes between two rows belong to none, and are zero.
    """
    row = packed.shape[-1]
    pitch = row_pitch(row)
    if packed.stride(-2) == pitch:
        return packed
    return torch.nn.functional.pad(packed, (0, pitch - row))[..., :row]


def check_weight(op: str, weight: Tensor, group: int) -> None:
    """Raise TensorContractError unless a weight is float32, bfloat16 or float16 [N, K] or [E, N, K], K a multiple of
    `group`. `op` is who asks.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TensorContractError(f"{op}: weight: got {weight.dtype}, expected float32, bfloat16 or float16")
    if weight.dim() not in (2, 3) or weight.shape[-1] % group:
        raise TensorContractError(
            f"{op}: weight: got shape {list(weight.shape)}, expected [N, K] or [E, N, K] with K a multiple of {group}"
        )


def groups_of_rows(op: str, weight: Tensor, group: int) -> Iterator[tuple[tuple[int, slice], Tensor]]:
    """Yield expert and rows of each part of a checked weight, and its values as float32 [rows, K / group, group].

    One matrix is expert 0.

    Raises:
        TensorContractError: a value is infinite or not a number.
    """
    step = max(1, CHUNK_ELEMENTS // max(1, weight.shape[-1]))
    for expert, matrix in enumerate(weight if weight.dim() == 3 else weight.unsqueeze(0)):
        for begin in range(0, matrix.shape[0], step):
            rows = slice(begin, begin + step)
            values = matrix[rows].float()
            if not bool(values.isfinite().all()):
                where = f"expert {expert}" if weight.dim() == 3 else "the matrix"
                raise TensorContractError(f"{op}: weight: {where} has values that are infinite or not a number")
            yield (expert, rows), values.unflatten(-1, (-1, group))
