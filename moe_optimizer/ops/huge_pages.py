"""Huge pages for weights that are read in place.

A row of weights is about as long as a 4 KiB page, so a kernel that streams rows looks up a new page for every row.
With 2 MiB pages it does not.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # linux/mman.h


def use_huge_pages(tensor: Tensor, *, as_written: bool = False) -> tuple[bool, str]:
    """Move the tensor's memory to huge pages, in place: addresses and contents stay.

    Takes about as long as copying the tensor once. Call it after the weights are loaded. Memory at the two ends that
    does not fill a huge page stays as it is.

    Args:
        tensor: on the CPU; also one that oneDNN has reordered.
        as_written: only memory that is written for the first time from now on is on huge pages; nothing is moved, and
            what is never written to takes no memory.

    Returns:
        Whether it was done, and the reason if not ("" if so). Not done is never an error: only speed differs.
    """
    if tensor.device.type != "cpu":
        return False, f"the tensor is on {tensor.device}"
    if not tensor.numel():
        return False, "the tensor is empty"
    start, end = _memory_of(tensor)
    first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - first
    if length <= 0:
        return False, "the tensor is smaller than a huge page"
    try:
        setting = SETTING.read_text(encoding="ascii")
    except OSError:
        return False, "the kernel has no transparent huge pages"
    if "[never]" in setting:
        return False, f"transparent huge pages are switched off ({SETTING})"
    for advice in (_MADV_HUGEPAGE,) if as_written else (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        code = _advise(first, length, advice)
        if code == errno.EINVAL and advice == _MADV_COLLAPSE:
            return False, "the kernel collapses pages only in the background (needs Linux 6.1)"
        if code:
            return False, f"madvise: {os.strerror(code)}"
    return True, ""


def zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, on a CPU on huge pages that take no memory before they are used.

    Raises:
        MemoryError: the system gives no mapping of that size.
    """
    if device.type != "cpu" or not shape.numel():
        return torch.zeros(shape, dtype=dtype, device=device)
    # A mapping of its own: torch writes its zeros, and numpy's can come from memory that the process used before, which
    # libc then clears by writing to all of it.
    bytes_needed = shape.numel() * dtype.itemsize
    try:
        mapping = mmap.mmap(-1, bytes_needed + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{bytes_needed / 2**30:.1f} GiB: {error.strerror}") from None
    pages = torch.frombuffer(mapping, dtype=torch.uint8)  # holds the mapping
    ahead = -pages.data_ptr() % HUGE_PAGE_BYTES
    pages = pages[ahead : ahead + bytes_needed]
    use_huge_pages(pages, as_written=True)
    return pages.view(dtype).view(shape)


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the end of the last element, gaps of the strides included."""
    if tensor.is_mkldnn:
        start = torch.ops.mkldnn.data_ptr(tensor)
        return start, start + torch.ops.mkldnn._nbytes(tensor)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _advise(address: int, length: int, advice: int) -> int:
    """Return 0, or the error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(advice))
    return ctypes.get_errno() if result else 0
