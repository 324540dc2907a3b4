"""The hash of a block stands for its tokens and all before them, with xxhash and without."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from moe_optimizer.engine import block_hash

NEEDS_XXHASH = pytest.mark.skipif(importlib.util.find_spec("xxhash") is None, reason="needs xxhash")


@pytest.mark.parametrize("hasher", [pytest.param("xxhash", marks=NEEDS_XXHASH), "blake2b"])
def test_a_hash_stands_for_the_tokens_and_those_before(hasher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasher == "blake2b":
        monkeypatch.setattr(block_hash, "xxhash", None)

    def chain(*blocks: list[int]) -> Any:
        found = b""
        for block in blocks:
            found = block_hash.block_hash(found, block)
        return found

    several = [chain([1, 2]), chain([2, 1]), chain([1, 2], [3, 4]), chain([0, 2], [3, 4]), chain([1, 2, 3, 4])]
    assert len({*several}) == 5
    assert {len(each) for each in several} == {16}
    assert chain([1, 2], [3, 4]) == several[2]


@pytest.mark.parametrize("hasher", [pytest.param("xxhash", marks=NEEDS_XXHASH), "blake2b"])
def test_another_process_has_other_hashes(hasher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasher == "blake2b":
        monkeypatch.setattr(block_hash, "xxhash", None)
    before = block_hash.block_hash(b"", [1, 2])
    monkeypatch.setattr(block_hash, "_KEY", b"another ")
    monkeypatch.setattr(block_hash, "_SEED", 1)
    assert block_hash.block_hash(b"", [1, 2]) != before
