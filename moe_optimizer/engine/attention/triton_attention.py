"""Attention on GPUs through kernels of Triton that read the KV blocks in place.

Legend: T tokens, H query heads, K key/value heads, R query heads for each, d head size, B blocks, S block size.
"""

# Names in kernels: M rows of a tile (R heads of each of its tokens), N keys read at a time, D = d rounded up.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_optimizer.engine.packed_batch import PackedBatch

TILE_KEYS = 64
_TILE_KEY_BYTES = 256
"""Most bytes of a key with tiles of that many: three stages of keys and values fit a core's shared memory."""
_PREFILL_ROWS = 64
_DECODE_ROWS = _LEAST_WIDTH = 16
"""The fewest rows and columns that a tensor core multiplies."""
PROGRAMS_PER_CORE = 2
WARPS, STAGES = 4, 3
"""Of a program, and of its loads: Triton's own choice."""
_MOST_SPLITS = 16
"""Chosen: a decode is split over the cores until each has two programs, up to this many."""


class TritonAttention:
    """One kernel stores, one attends; few decodes are split by keys, and a third kernel joins their parts."""

    capturable = True

    def attend(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch) -> Tensor:
        store(k_TKd, v_TKd, cache_2BSKd, batch.slots_T)
        out_THd = torch.empty(q_THd.shape, dtype=q_THd.dtype, device=q_THd.device)
        decodes, prefills = batch.num_decodes, batch.prefills
        if decodes:
            part = TiledSequences(0, decodes, 1, _DECODE_ROWS, _num_splits(decodes * k_TKd.shape[1], q_THd.device))
            _launch(q_THd, cache_2BSKd, out_THd, batch, part)
        if prefills:
            longest = max(prefill.end - prefill.begin for prefill in prefills)
            part = TiledSequences(decodes, len(prefills), longest, _PREFILL_ROWS, 1)
            _launch(q_THd, cache_2BSKd, out_THd, batch, part)
        return out_THd


@dataclass(frozen=True, slots=True)
class TiledSequences:
    """Sequences [first, first + count) of a step, and how they are tiled."""

    first: int
    count: int
    longest: int
    """Most tokens of one of them."""
    least_rows: int
    """Rows of a tile: query heads that share keys, of one token or several."""
    splits: int
    """Parts that the keys are split into."""


def store(k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, slots_T: Tensor) -> None:
    """Write keys and values into their slots of the cache; those of padding nowhere."""
    width = k_TKd.shape[1] * k_TKd.shape[2]
    _store[(len(k_TKd),)](
        k_TKd, v_TKd, cache_2BSKd[0], cache_2BSKd[1], slots_T,
        k_TKd.stride(0), v_TKd.stride(0), width, triton.next_power_of_2(width),
    )  # fmt: skip


def _num_splits(num_programs: int, device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = PROGRAMS_PER_CORE * cores // num_programs
    return min(_MOST_SPLITS, triton.next_power_of_2(max(1, wanted)))


def _launch(q_THd: Tensor, cache_2BSKd: Tensor, out_THd: Tensor, batch: PackedBatch, part: TiledSequences) -> None:
    _, heads, size = q_THd.shape
    _, _, block_size, kv_heads, _ = cache_2BSKd.shape
    shared = heads // kv_heads
    rows = max(part.least_rows, triton.next_power_of_2(shared))
    tokens = rows // shared
    width = max(_LEAST_WIDTH, triton.next_power_of_2(size))
    keys = TILE_KEYS if width * q_THd.element_size() <= _TILE_KEY_BYTES else TILE_KEYS // 2
    parts = lse = out_THd
    if part.splits > 1:
        parts = torch.empty((part.splits, part.count, heads, size), dtype=torch.float32, device=q_THd.device)
        lse = torch.empty((part.splits, part.count, heads), dtype=torch.float32, device=q_THd.device)
    _attend[(triton.cdiv(part.longest, tokens), kv_heads, part.count * part.splits)](
        q_THd, cache_2BSKd[0], cache_2BSKd[1], out_THd, parts, lse,
        batch.block_tables_SN, batch.context_lengths_S, batch.query_starts_S1,
        q_THd.stride(0), batch.block_tables_SN.stride(0), part.first, part.count, size**-0.5,
        H=heads, K=kv_heads, d=size, S=block_size, TOKENS=tokens, M=rows, N=keys, D=width, SPLITS=part.splits,
        PRECISION="ieee" if q_THd.dtype == torch.float32 else "tf32", num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if part.splits > 1:
        _join[(part.count, heads)](parts, lse, out_THd, part.count, H=heads, d=size, D=width, SPLITS=part.splits)


@triton.jit
def _store(k, v, keys, values, slots, k_stride, v_stride, width, WIDTH: tl.constexpr):
    """Write one token's key and value into its slot; none for padding."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    place = tl.arange(0, WIDTH)
    inside = place < width
    tl.store(keys + slot * width + place, tl.load(k + token * k_stride + place, mask=inside), mask=inside)
    tl.store(values + slot * width + place, tl.load(v + token * v_stride + place, mask=inside), mask=inside)


# What changes from step to step is not specialised: Triton would compile anew for an argument of one, of a multiple of
# 16 and of any other number, and all combinations of them, while requests wait.
@triton.jit(do_not_specialize=["table_stride", "first", "count"])
def _attend(
    q, keys, values, out, parts, lse, tables, lengths, query_starts, q_stride, table_stride, first, count, scale,
    H: tl.constexpr, K: tl.constexpr, d: tl.constexpr, S: tl.constexpr, TOKENS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with TOKENS tokens of one sequence, all query heads of one key/value head, over one part of the keys."""
    R: tl.constexpr = H // K
    kv_head = tl.program_id(1)
    row_of_sequence = tl.program_id(2) // SPLITS
    split = tl.program_id(2) % SPLITS
    sequence = first + row_of_sequence
    begin = tl.load(query_starts + sequence).to(tl.int64)
    num_queries = tl.load(query_starts + sequence + 1) - begin
    length = tl.load(lengths + sequence)
    first_token = tl.program_id(0) * TOKENS
    if first_token >= num_queries:
        return

    row = tl.arange(0, M)
    token = first_token + row // R
    head = kv_head * R + row % R
    is_row = (row < TOKENS * R) & (token < num_queries)
    position = length - num_queries + token
    dim = tl.arange(0, D)
    is_dim = dim < d
    q_place = (begin + token)[:, None] * q_stride + (head * d)[:, None] + dim[None, :]
    q_MD = tl.load(q + q_place, mask=is_row[:, None] & is_dim[None, :], other=0.0)

    # Keys [low, high): those that the tile's last token attends to, the part of this split.
    end = tl.minimum(length, length - num_queries + first_token + TOKENS)
    each = tl.cdiv(tl.cdiv(end, SPLITS), N) * N
    low = split * each
    high = tl.minimum(end, low + each)
    most_M = tl.full((M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((M,), tl.float32)
    acc_MD = tl.zeros((M, D), tl.float32)
    for start in range(low, high, N):
        column = start + tl.arange(0, N)
        is_column = column < high
        block = tl.load(tables + sequence * table_stride + column // S, mask=is_column, other=0).to(tl.int64)
        place = ((block * S + column % S) * K + kv_head) * d
        k_DN = tl.load(keys + place[None, :] + dim[:, None], mask=is_dim[:, None] & is_column[None, :], other=0.0)
        scores = tl.dot(q_MD, k_DN, input_precision=PRECISION) * scale
        scores = tl.where(is_column[None, :] & (column[None, :] <= position[:, None]), scores, float("-inf"))
        new_M = tl.maximum(most_M, tl.max(scores, 1))
        # A row may have seen no key yet: minus infinity less itself is no number.
        shift_M = tl.where(new_M == float("-inf"), 0.0, new_M)
        probs = tl.exp(scores - shift_M[:, None])
        fade_M = tl.exp(most_M - shift_M)
        v_ND = tl.load(values + place[:, None] + dim[None, :], mask=is_column[:, None] & is_dim[None, :], other=0.0)
        acc_MD = acc_MD * fade_M[:, None] + tl.dot(probs.to(v_ND.dtype), v_ND, input_precision=PRECISION)
        sum_M = sum_M * fade_M + tl.sum(probs, 1)
        most_M = new_M

    result = acc_MD / tl.where(sum_M == 0, 1.0, sum_M)[:, None]
    mask = is_row[:, None] & is_dim[None, :]
    if SPLITS == 1:
        out_place = ((begin + token) * H + head)[:, None] * d + dim[None, :]
        tl.store(out + out_place, result.to(out.dtype.element_ty), mask=mask)
    else:
        # A decode: one token of each sequence.
        place_M = (split * count + row_of_sequence) * H + head
        tl.store(parts + place_M[:, None] * d + dim[None, :], result, mask=mask)
        tl.store(lse + place_M, most_M + tl.log(sum_M), mask=is_row)


@triton.jit(do_not_specialize=["count"])
def _join(parts, lse, out, count, H: tl.constexpr, d: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):
    """Add up the parts of one head of one decode, each with its share of the probability."""
    place = tl.program_id(0) * H + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, D)
    lse_X = tl.load(lse + split * count * H + place)
    most = tl.max(lse_X, 0)
    weight_X = tl.exp(lse_X - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(weight_X, 0)
    part_place = (split * count * H + place)[:, None] * d + dim[None, :]
    part_XD = tl.load(parts + part_place, mask=(dim < d)[None, :], other=0.0)
    joined = tl.sum(part_XD * weight_X[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + place * d + dim, joined.to(out.dtype.element_ty), mask=dim < d)
