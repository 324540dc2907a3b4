"""`Block` and `BlockTable`: a piece of KV cache, and the pieces that one sequence is held in.

Block numbers count on from the device to host memory, which holds the sequences that are swapped out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

Copies = list[tuple[int, int]]
"""(from, to) block numbers."""


@dataclass(slots=True)
class Block:
    """One block of the KV cache."""

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
