"""`Block` and `BlockTable`: a piece of KV cache, and the pieces that one sequence is held in."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class Block:
    """One block of the KV cache on the device."""

    block_id: int
    ref_count: int = 0
    """Block tables that hold it."""
    content: bytes | None = None
    """Hash of the tokens up to its end, once it is full and computed: the key other prompts find it by."""

    @property
    def writable(self) -> bool:
        """Whether its one holder may write into it: nobody else reads it, and no prompt may find it."""
        return self.ref_count == 1 and self.content is None


@dataclass(slots=True)
class BlockTable:
    """Where a sequence's keys and values are: token i is in block `block_ids[i // block_size]`."""

    block_ids: array[int] = field(default_factory=lambda: array("i"))
    contents: list[bytes] = field(default_factory=list)
    """Hashes of its first blocks, as many as are full and computed."""
    host_ids: list[int] = field(default_factory=list)
    """Blocks in host memory, in place of `block_ids`, while the sequence is swapped out."""
