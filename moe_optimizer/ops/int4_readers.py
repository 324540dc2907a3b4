"""Reads a matrix of an INT4 checkpoint as `Int4Weight`: the same integers in another order, bit for bit.

Legend: E experts, N output channels, K input channels of one matrix, G columns that share a scale. A leading [E] may
be absent in all tensors of a call. int32 words hold eight codes, the first in the lowest four bits.

                         codes                       zero points                         scales
    GPTQ                 qweight [E, K / 8, N]       qzeros [E, K / G, N / 8]            scales [E, K / G, N]
    AWQ                  qweight [E, K, N / 8]       qzeros [E, K / G, N / 8]            scales [E, K / G, N]
    compressed-tensors   weight_packed [E, N, K / 8] weight_zero_point [E, N / 8, K / G] weight_scale [E, N, K / G]

GPTQ's first format stores zero points less one. AWQ's words hold the columns in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops.four_bit_codes import pack_pairs, unpack_pairs
from moe_optimizer.ops.int4 import CODE_DTYPE, SYMMETRIC_ZERO, Int4Weight, check_int4
from moe_optimizer.ops.tensor_check import TensorChecks

CODES_PER_WORD = 8
_NATURAL = tuple(range(CODES_PER_WORD))
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_WORD = torch.int32


def from_gptq(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    g_idx: Tensor | None = None,
    *,
    zeros_less_one: bool = True,
) -> Int4Weight:
    """Return what GPTQ stores.

    Args:
        qweight: int32 [E, K / 8, N].
        scales: float16 or bfloat16 [E, K / G, N].
        qzeros: int32 [E, K / G, N / 8]; None: a symmetric matrix.
        g_idx: integers [E, K], the group of each input channel; None or empty: in order.
        zeros_less_one: the first format ("gptq"); False: the second ("gptq_v2"), which stores zero points as they are.

    Returns:
        Contiguous tensors. Zero points that all are 8 are left out.

    Raises:
        TensorContractError: a shape or dtype differs; the channels' groups are not in order (act-order), which the
            layout cannot hold; or a zero point is 16, which four bits cannot hold.
    """
    _check_words("from_gptq", qweight=qweight, qzeros=qzeros)
    _check_ranks("from_gptq", qweight.dim(), scales=scales, qzeros=qzeros)
    codes = _bytes_of(qweight.transpose(-1, -2))
    weight = Int4Weight(codes, scales.transpose(-1, -2).contiguous())
    check_int4(TensorChecks("from_gptq"), weight)
    refuse_act_order(g_idx, weight.columns, weight.group)
    if qzeros is None:
        return weight
    zero = _words_along_rows(qzeros, _NATURAL)
    if zeros_less_one:
        if bool((zero == 15).any()):
            raise TensorContractError("from_gptq: qzeros: got 15, which stands for the zero point 16, expected 0 to 14")
        zero = zero + 1
    return _with_zero("from_gptq", weight, zero)


def from_awq(qweight: Tensor, scales: Tensor, qzeros: Tensor | None = None) -> Int4Weight:
    """Return what AWQ stores.

    Args:
        qweight: int32 [E, K, N / 8].
        scales: float16 or bfloat16 [E, K / G, N].
        qzeros: int32 [E, K / G, N / 8]; None: a symmetric matrix.

    Returns:
        Contiguous tensors. Zero points that all are 8 are left out.

    Raises:
        TensorContractError: a shape or dtype differs.
    """
    _check_words("from_awq", qweight=qweight, qzeros=qzeros)
    _check_ranks("from_awq", qweight.dim(), scales=scales, qzeros=qzeros)
    codes = pack_pairs(_words_along_rows(qweight, _AWQ_ORDER)).contiguous()
    weight = Int4Weight(codes, scales.transpose(-1, -2).contiguous())
    check_int4(TensorChecks("from_awq"), weight)
    return weight if qzeros is None else _with_zero("from_awq", weight, _words_along_rows(qzeros, _AWQ_ORDER))


def from_compressed_tensors(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
) -> Int4Weight:
    """Return what compressed-tensors stores in its format pack-quantized.

    Codes and zero points are stored plus 8, both: their difference is the same.

    Args:
        weight_packed: int32 [E, N, K / 8].
        weight_scale: bfloat16 or float16 [E, N, K / G].
        weight_zero_point: int32 [E, N / 8, K / G], the rows of a group in one word, N rounded up to whole words;
            None: a symmetric matrix.
        weight_g_idx: integers [E, K], the group of each input channel; None or empty: in order.

    Returns:
        Contiguous tensors. Zero points that all are 8 are left out.

    Raises:
        TensorContractError: a shape or dtype differs, or the channels' groups are not in order (act-order).
    """
    _check_words("from_compressed_tensors", weight_packed=weight_packed, weight_zero_point=weight_zero_point)
    _check_ranks(
        "from_compressed_tensors",
        weight_packed.dim(),
        weight_scale=weight_scale,
        weight_zero_point=weight_zero_point,
    )
    weight = Int4Weight(_bytes_of(weight_packed), weight_scale.contiguous())
    check_int4(TensorChecks("from_compressed_tensors"), weight)
    refuse_act_order(weight_g_idx, weight.columns, weight.group)
    if weight_zero_point is None:
        return weight
    zero = _words_along_rows(weight_zero_point.transpose(-1, -2), _NATURAL)
    return _with_zero("from_compressed_tensors", weight, zero[..., : weight.codes.shape[-2], :])


def refuse_act_order(g_idx: Tensor | None, columns: int, group: int) -> None:
    """Raise TensorContractError unless input channel k belongs to group k // `group`, for every k and expert.

    With act-order (GPTQ's desc_act) it does not: neighbouring columns then have scales of their own.
    """
    if g_idx is None or g_idx.numel() == 0:
        return
    in_order = torch.arange(columns, device=g_idx.device) // group
    if g_idx.shape[-1] != columns:
        raise TensorContractError(f"act-order: g_idx: got shape {list(g_idx.shape)}, expected {columns} channels last")
    if not bool((g_idx.long() == in_order).all()):
        raise TensorContractError(
            f"act-order: g_idx: the groups of the input channels are not in order, expected channel k in group k // "
            f"{group}: a group of neighbouring columns has no scale of its own then"
        )


def _bytes_of(words: Tensor) -> Tensor:
    """Return uint8 [.., 4 n] of int32 [.., n]: eight codes along a row as four pairs, the first code first."""
    assert sys.byteorder == "little", f"words are read as bytes, lowest first: got a {sys.byteorder}-endian machine"
    return words.contiguous().view(CODE_DTYPE)


def _words_along_rows(words: Tensor, order: Sequence[int]) -> Tensor:
    """Return codes [.., N, c] of words [.., c, N / 8] along N, of which code i of a word is column `order[i]` of it."""
    codes = unpack_pairs(_bytes_of(words)).unflatten(-1, (-1, CODES_PER_WORD))
    places = [list(order).index(column) for column in _NATURAL]
    return codes[..., places].flatten(-2).transpose(-1, -2)


def _with_zero(reader: str, weight: Int4Weight, zero: Tensor) -> Int4Weight:
    if zero.shape == weight.scale.shape and bool((zero == SYMMETRIC_ZERO).all()):
        return weight
    weight = weight._replace(zero=zero.contiguous())
    check_int4(TensorChecks(reader), weight)
    return weight


def _check_words(reader: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != _WORD:
            raise TensorContractError(f"{reader}: {name}: got {tensor.dtype}, expected {_WORD}")


def _check_ranks(reader: str, rank: int, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if rank not in (2, 3) or (tensor is not None and tensor.dim() != rank):
            got = None if tensor is None else list(tensor.shape)
            raise TensorContractError(f"{reader}: {name}: got shape {got}, expected {rank} dimensions (2 or 3)")
