"""`BlockManager`: which sequence holds which block of the KV cache, and which blocks can be found again."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from moe_optimizer.engine.block import Block, Copies
from moe_optimizer.engine.block_hash import block_hash
from moe_optimizer.engine.sequence import Sequence


@dataclass(eq=False)
class BlockManager:
    """Hands out blocks, shares those with equal content, and takes them back.

    A block is in one of three places: held (ref_count > 0), cached (not held, its content may be found by a prompt;
    the least recently used is evicted first) or free.
    """

    num_blocks: int
    """On the device."""
    num_host_blocks: int = 0
    """In host memory, for sequences that are swapped out."""
    block_size: int = 16
    """Tokens per block."""
    prefix_caching: bool = True
    """Let prompts find blocks of earlier ones."""

    def __post_init__(self) -> None:
        total = self.num_blocks + self.num_host_blocks
        self.blocks = [Block(number) for number in range(total)]
        self.copies: Copies = []
        """To be made before the next step, in their order."""
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_content: dict[bytes, int] = {}
        self._free_host = list(range(total - 1, self.num_blocks - 1, -1))

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # Prefix caching

    def take_prefix(self, sequence: Sequence) -> None:
        """Give a sequence without blocks those that hold the beginning of its tokens.

        At least the last token is left to be computed: its logits are needed.
        """
        if not self.prefix_caching:
            return
        table = sequence.block_table
        before = b""
        for start in range(0, sequence.num_tokens - self.block_size, self.block_size):
            before = block_hash(before, sequence.token_ids[start : start + self.block_size])
            block_id = self._by_content.get(before)
            if block_id is None:
                break
            self._hold(block_id)
            table.block_ids.append(block_id)
            table.contents.append(before)
        sequence.num_computed_tokens = len(table.block_ids) * self.block_size

    def publish(self, sequence: Sequence) -> None:
        """Let prompts find the sequence's blocks that have become full.

        Asked for prompts; the blocks of an output are published when the sequence lets go of them.
        """
        if not self.prefix_caching:
            return
        table, size = sequence.block_table, self.block_size
        before = table.contents[-1] if table.contents else b""
        for index in range(len(table.contents), min(sequence.num_computed_tokens // size, len(table.block_ids))):
            before = block_hash(before, sequence.token_ids[index * size : (index + 1) * size])
            table.contents.append(before)
            block = self.blocks[table.block_ids[index]]
            if block.content is None and before not in self._by_content and block.block_id < self.num_blocks:
                block.content = before
                self._by_content[before] = block.block_id

    # Holding and letting go

    def make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give the sequence blocks for `num_tokens` more than are computed; return whether there were enough.

        A block that others read is not written to: the sequence gets a copy of it.
        """
        table = sequence.block_table
        end = sequence.num_computed_tokens + num_tokens
        written = sequence.num_computed_tokens // self.block_size
        shared = written < len(table.block_ids) and not self.blocks[table.block_ids[written]].writable
        num_new = self.blocks_for(end) - len(table.block_ids)
        if num_new + shared > self.num_available:
            return False
        if shared:
            source, target = table.block_ids[written], self._take()
            self.copies.append((source, target))
            table.block_ids[written] = target
            self._release(source)
        for _ in range(num_new):
            table.block_ids.append(self._take())
        self._count_slots(sequence)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share the blocks of `parent`, which has computed all of its tokens but the last."""
        for block_id in parent.block_table.block_ids:
            self._hold(block_id)
        child.block_table.block_ids = array("i", parent.block_table.block_ids)
        child.block_table.contents = parent.block_table.contents[: (child.num_tokens - 1) // self.block_size]
        child.num_computed_tokens = child.num_tokens - 1
        # Both must ask before they write next.
        parent.num_slots = child.num_slots = 0

    def free(self, sequence: Sequence) -> None:
        """Take back every block, on the device and in host memory."""
        self.publish(sequence)
        # The end first: of a prompt that is used again, the beginning is worth most.
        for block_id in reversed(sequence.block_table.block_ids):
            self._release(block_id)
        sequence.block_table.block_ids, sequence.block_table.contents = array("i"), []
        sequence.num_computed_tokens = sequence.num_slots = 0

    # Swapping

    def swap_out(self, sequence: Sequence) -> bool:
        """Move the sequence to host memory; return whether there was room."""
        return len(sequence.block_table.block_ids) <= len(self._free_host) and self._move(sequence, to_host=True)

    def swap_in(self, sequence: Sequence) -> bool:
        """Move the sequence back to the device; return whether there was room, for its next token too."""
        needed = max(len(sequence.block_table.block_ids), self.blocks_for(sequence.num_tokens))
        return needed <= self.num_available and self._move(sequence, to_host=False)

    def _move(self, sequence: Sequence, *, to_host: bool) -> bool:
        table, num_computed = sequence.block_table, sequence.num_computed_tokens
        taken = array("i", [self._free_host.pop() if to_host else self._take() for _ in table.block_ids])
        self.copies.extend(zip(table.block_ids, taken, strict=True))
        self.free(sequence)
        for block_id in taken:
            self.blocks[block_id].ref_count = 1
        table.block_ids, sequence.num_computed_tokens = taken, num_computed
        self._count_slots(sequence)
        return True

    def _count_slots(self, sequence: Sequence) -> None:
        # A longest sequence's last token needs none.
        slots = len(sequence.block_table.block_ids) * self.block_size
        sequence.num_slots = min(slots, sequence.group.max_num_tokens - 1)

    # One block

    def _take(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._by_content.pop(self.blocks[block_id].content or b"")
            self.blocks[block_id].content = None
        self.blocks[block_id].ref_count = 1
        return block_id

    def _hold(self, block_id: int) -> None:
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self._cached[block_id]
        block.ref_count += 1

    def _release(self, block_id: int) -> None:
        block = self.blocks[block_id]
        block.ref_count -= 1
        if not block.ref_count and block.content is None:
            (self._free if block_id < self.num_blocks else self._free_host).append(block_id)
        elif not block.ref_count:
            self._cached[block_id] = None

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that every block is in exactly one place, and held as often as `sequences` (all there are) hold it."""
        tables = [sequence.block_table for sequence in sequences]
        held = Counter(block_id for table in tables for block_id in table.block_ids)
        counts = {block.block_id: block.ref_count for block in self.blocks if block.ref_count}
        assert counts == held, f"reference counts {counts}, block tables hold {held}"
        free = [*self._free, *self._free_host]
        assert sorted([*free, *counts, *self._cached]) == list(range(len(self.blocks))), (
            f"free {len(free)} + used {len(counts)} + cached {len(self._cached)} != {len(self.blocks)}"
        )
        found = {block.content: block.block_id for block in self.blocks if block.content is not None}
        assert found == self._by_content, "contents differ from the index"
