"""Huge pages: the contents stay, the answer says what happened."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_optimizer.ops import huge_pages
from moe_optimizer.ops.huge_pages import use_huge_pages, zeros


def mapping_at(address: int) -> dict[str, list[str]]:
    """What the system says of the mapping at `address`: the words after each name."""
    inside, found = False, {}
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        header = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if header:
            inside = int(header[1], 16) <= address < int(header[2], 16)
        elif inside:
            name, *words = line.split()
            found[name.removesuffix(":")] = words
    return found


def huge_bytes(address: int) -> int:
    """Bytes of the mapping at `address` that lie on huge pages."""
    return int(mapping_at(address)["AnonHugePages"][0]) << 10


def test_contents_stay_and_the_memory_is_on_huge_pages() -> None:
    tensor = torch.arange(4 << 20, dtype=torch.int32)  # 16 MiB
    address = tensor.data_ptr()
    done, reason = use_huge_pages(tensor)
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, torch.arange(4 << 20, dtype=torch.int32))
    if not done:
        pytest.skip(f"this machine: {reason}")
    middle = address + (8 << 20)
    assert huge_bytes(middle) >= 8 << 20


def test_memory_of_a_reordered_weight_is_on_huge_pages() -> None:
    weight = torch.randn(2048, 2048)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    done, reason = use_huge_pages(packed)
    if not done:
        pytest.skip(f"this machine: {reason}")
    assert huge_bytes(torch.ops.mkldnn.data_ptr(packed) + (8 << 20)) >= 8 << 20


def resident_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's pages that take memory."""
    page = mmap.PAGESIZE
    first, end = tensor.data_ptr() // page * page, tensor.data_ptr() + tensor.nbytes
    present = (ctypes.c_ubyte * -(-(end - first) // page))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(end - first), present) == 0, ctypes.get_errno()
    return sum(byte & 1 for byte in present) * page


def test_memory_that_is_not_written_yet_is_not_taken() -> None:
    pages = zeros(torch.Size((2, 16 << 20)), torch.bfloat16, torch.device("cpu"))
    done, reason = use_huge_pages(pages, as_written=True)
    assert resident_bytes(pages) == 0
    if not done:
        pytest.skip(f"this machine: {reason}")
    pages[1, 0] = 1
    # Where no huge page is free, the system gives a small one. It is asked for huge ones, and takes one at most.
    assert "hg" in mapping_at(pages.data_ptr())["VmFlags"]
    assert 0 < resident_bytes(pages) <= 2 << 20


def test_memory_that_the_process_used_before_is_not_taken_again() -> None:
    # libc shares out memory of its heap again once it has given back a mapping of that size.
    used = [np.ones(20 << 20, np.uint8) for _ in range(8)]
    used = [np.ones(20 << 20, np.uint8) for _ in range(16)]
    kept = np.ones(20 << 20, np.uint8)
    del used
    pages = zeros(torch.Size((64 << 20,)), torch.uint8, torch.device("cpu"))
    assert resident_bytes(pages) == 0
    assert not pages.any()
    assert kept.all()


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(0), "is empty"),
        (torch.zeros(1000), "a huge page"),
        (torch.zeros(10, device="meta"), "on meta"),
    ],
    ids=["empty", "small", "meta"],
)
def test_what_cannot_be_done_is_said(tensor: torch.Tensor, reason: str) -> None:
    used, why_not = use_huge_pages(tensor)
    assert not used
    assert why_not.endswith(reason)


def test_switched_off_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n", encoding="ascii")
    monkeypatch.setattr(huge_pages, "SETTING", setting)
    done, reason = use_huge_pages(torch.zeros(4 << 20))
    assert not done
    assert "switched off" in reason
