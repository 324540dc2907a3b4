"""Calls of few requests' attention to a paged cache, for the kernel's emulation and for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_optimizer.ops.kernel_arguments import PagedDecode
from tests.kernel_emulator import guarded

GARBAGE = 3.0e38
"""In every place of a cache that no request names: what is read there shows."""


def make_decode_case(
    lengths: Sequence[int],
    *,
    heads: int = 8,
    kv_heads: int = 1,
    size: int = 64,
    block_size: int = 16,
    layout: str = "NHD",
    device: str = "cpu",
    sharpness: float = 1.0,
    padding: int = 0,
    new: bool = False,
    seed: int = 1,
) -> PagedDecode:
    """Return fresh random inputs with a poisoned output.

    Args:
        lengths: keys of each request; 0: a padding row of a captured graph.
        heads: query heads.
        kv_heads: of keys and values.
        size: of a head.
        block_size: keys of a block. Blocks lie scattered, and what lies behind a length is `GARBAGE`.
        layout: "NHD", where the heads of a key are neighbours, or "HND", as vLLM names them.
        device: on a CPU each tensor ends where an unreadable page begins.
        sharpness: factor of the scores; large ones choose one key.
        padding: elements between tokens of q and of the output.
        new: the last key of each request is given beside the cache, where its place holds `GARBAGE`.
        seed: of the numbers.
    """
    g = torch.Generator().manual_seed(seed)
    place: Any = guarded if device == "cpu" else lambda tensor: tensor.to(device)
    needed = [-(-length // block_size) for length in lengths]
    blocks = torch.randperm(sum(needed) + 3, generator=g).int()
    shape = (len(blocks), block_size, kv_heads, 2 * size) if layout == "NHD" else (
        len(blocks), kv_heads, block_size, 2 * size)  # fmt: skip
    stored = torch.randn(shape, generator=g).bfloat16()
    logical = stored.transpose(1, 2) if layout == "NHD" else stored
    # The table is wider than any context; what lies behind one names no block.
    table = torch.full((len(lengths), max(needed, default=0) + 2), 2**30, dtype=torch.int32)
    named, first = torch.zeros(len(blocks), block_size, dtype=torch.bool), 0
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        own = blocks[first : first + count]
        table[row, :count] = own
        first += count
        flat = torch.arange(count * block_size) < length
        named[own.long()] = flat.view(count, block_size)
    logical.masked_fill_(~named[:, None, :, None], GARBAGE)
    new_rows: tuple[Tensor, ...] = ()
    if new:
        last = torch.tensor(lengths).clamp(min=1) - 1
        slots = table[torch.arange(len(lengths)), last // block_size].long() * block_size + last % block_size
        slots[torch.tensor(lengths) == 0] = -1
        # As a model's projection has them: behind the queries, keys and values of a token one after the other.
        projected = place(torch.randn(len(lengths), 2 * kv_heads * size + padding, generator=g).bfloat16())
        keys, values = (
            projected[:, n * kv_heads * size :][:, : kv_heads * size].unflatten(1, (kv_heads, size)) for n in range(2)
        )
        there = slots >= 0
        logical[slots[there] // block_size, :, slots[there] % block_size] = GARBAGE
        new_rows = (keys, values, place(slots))
    cache = place(stored)
    rows = (len(lengths), heads * size + padding)
    q = place(torch.randn(rows, generator=g).bfloat16())[:, : heads * size].unflatten(1, (heads, size))
    out = place(torch.full(rows, float("nan")).bfloat16())[:, : heads * size].unflatten(1, (heads, size))
    return PagedDecode(
        q, cache.transpose(1, 2) if layout == "NHD" else cache, place(table),
        place(torch.tensor(lengths, dtype=torch.int32)), sharpness * size**-0.5, out, *new_rows,
    )  # fmt: skip


def exact(call: PagedDecode) -> tuple[Tensor, Tensor]:
    """The result in float64, and the same of the values' magnitudes. New keys are stored by then."""
    call = call._replace(**{name: getattr(call, name).cpu() for name in ("q", "cache", "block_table", "lengths")})
    heads, kv_heads, size = call.q.shape[1], call.cache.shape[1], call.q.shape[2]
    out = torch.zeros(2, *call.q.shape, dtype=torch.float64)
    for row, length in enumerate(call.lengths.tolist()):
        blocks = call.block_table[row, : -(-length // call.cache.shape[2])].long()
        keys = call.cache[blocks].transpose(1, 2).flatten(0, 1)[:length].double()  # [length, K, 2 d]
        for head in range(heads if length else 0):
            own = keys[:, head // (heads // kv_heads)]
            weights = (own[:, :size] @ call.q[row, head].double() * call.scale).softmax(0)
            out[:, row, head] = torch.stack((weights @ own[:, size:], weights @ own[:, size:].abs()))
    return out[0], out[1]


def assert_attended(call: PagedDecode) -> None:
    """The output is the exact one but for the rounding of the weights and of the output to BF16, and FP32's.

    Scores of up to a few hundred are off by 2^-14 at most, and a weight by so much of itself.
    """
    want, terms = exact(call)
    bound = want.abs() * 2.0**-8 + terms * (2.0**-8 + 2.0**-13) + 1e-30
    off = (call.out.cpu().double() - want).abs()
    assert (off <= bound).all(), float((off - bound).max())


def poisoned(call: PagedDecode) -> PagedDecode:
    """The same call after its output was overwritten."""
    call.out.fill_(float("nan"))
    return call


def result(call: PagedDecode) -> Tensor:
    """A copy of what the call wrote."""
    return call.out.clone()
