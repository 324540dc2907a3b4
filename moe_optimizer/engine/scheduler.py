"""`Scheduler`: which sequences the next step computes, and how many tokens of each."""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter

from moe_optimizer.engine.block_manager import BlockManager
from moe_optimizer.engine.scheduler_output import SchedulerOutput
from moe_optimizer.engine.sequence import Sequence, Status
from moe_optimizer.log import get_logger

_log = get_logger(__name__)
_order = attrgetter("order")
# Chosen: the part of the blocks that stays free when a prompt is admitted, for the sequences that already run: each
# needs a block soon, and a prompt that takes the last one is preempted for it.
_RESERVED_SHARE = 0.01


@dataclass(eq=False)
class Scheduler:
    """Fills each step up to a budget of tokens: decodes first, then prompts under way, then new ones.

    Sequences are served by priority, and in the order of arrival within one. When blocks run out, the sequence that
    is served last gives up its own; it comes back by computing its tokens again, or from host memory.
    """

    blocks: BlockManager
    max_num_seqs: int
    """In one step."""
    max_num_batched_tokens: int
    """In one step."""
    chunked_prefill: bool = True
    """Compute long prompts in several steps, beside decodes."""
    swap: bool = False
    """Move a preempted sequence to host memory while there is room, instead of computing it again."""
    running: list[Sequence] = field(default_factory=list)
    """In the order they are served."""
    num_preemptions: int = 0
    _waiting: list[tuple[tuple[int, int, int], Sequence]] = field(default_factory=list)
    _prefilling: list[Sequence] = field(default_factory=list)
    """Running sequences with a prompt to compute; all others have one token."""

    def __post_init__(self) -> None:
        self._num_reserved = int(_RESERVED_SHARE * self.blocks.num_blocks)

    # Requests come and go

    def add(self, sequence: Sequence, status: Status = Status.WAITING) -> None:
        sequence.status = status
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and its blocks back."""
        if sequence.status is Status.RUNNING:
            self.running.pop(bisect_left(self.running, sequence.order, key=_order))
        # One that waits stays in the heap and is dropped when its turn comes.
        sequence.status = Status.FINISHED
        self.blocks.free(sequence)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a seat, here or in host memory."""
        return sum(sequence.status is not Status.FINISHED for _, sequence in self._waiting)

    # One step

    def schedule(self) -> SchedulerOutput:
        """Decide what the next step computes, and make room for it."""
        step = SchedulerOutput()
        self._preempt_for_priority(step)
        prefilling = self._schedule_decodes(step)
        budget = self.max_num_batched_tokens - len(step.decodes)
        for sequence in prefilling:
            budget -= self._schedule_chunk(step, sequence, budget)
        # Who has just been preempted would only take the room that was made.
        if not step.preempted:
            self._admit(step, budget)
        step.sampled = step.decodes + [
            sequence for sequence, n in step.prefills if sequence.num_computed_tokens + n == sequence.num_tokens
        ]
        step.copies, self.blocks.copies = self.blocks.copies, []
        _log.debug("%s, %d blocks available", step, self.blocks.num_available)
        return step

    def commit(self, step: SchedulerOutput) -> None:
        """Count what a step that was launched computes and samples; let the samples behind the first start."""
        for sequence in step.decodes:
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.num_tokens += 1
        for sequence, count in step.prefills:
            sequence.num_computed_tokens += count
            self.blocks.publish(sequence)
            if sequence.num_computed_tokens < sequence.num_tokens:
                continue
            sequence.num_tokens += 1
            if not sequence.group.forked:
                sequence.group.forked = True
                for other in sequence.group.sequences[1:]:
                    self._fork(sequence, other)

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        """Run another sample of a prompt that `parent` has computed; without a seat it waits like a new one."""
        if len(self.running) >= self.max_num_seqs:
            self.add(child)
            return
        self.blocks.fork(parent, child)
        self._run(child)

    def _schedule_decodes(self, step: SchedulerOutput) -> list[Sequence]:
        """Schedule every running sequence with one token to compute; return the others."""
        # Passes over all sequences are this function's time: those that need no block are not called for one by one.
        asking = [each for each in self.running if each.num_tokens > each.num_slots]
        for sequence in asking:
            if sequence.num_tokens == sequence.group.max_num_tokens:
                # Its last token is under way.
                self.finish(sequence)
        for sequence in asking:
            if sequence.status is Status.RUNNING:
                self._make_room(step, sequence)
        self._prefilling = [each for each in self._prefilling if each.status is Status.RUNNING and _has_prompt(each)]
        others = set(self._prefilling)
        step.decodes = [each for each in self.running if each not in others] if others else self.running.copy()
        return sorted(others, key=_order)

    def _make_room(self, step: SchedulerOutput, sequence: Sequence) -> None:
        """Make room for one token, at the cost of those served after `sequence`, or of itself."""
        while not self.blocks.make_room(sequence, 1):
            victim = self.running[-1]
            self._preempt(step, victim)
            if victim is sequence:
                return

    def _schedule_chunk(self, step: SchedulerOutput, sequence: Sequence, budget: int) -> int:
        """Schedule as much of a prompt as the budget allows, whose blocks it has; return how much."""
        count = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
        if count > 0:
            step.prefills.append((sequence, count))
        return count

    def _admit(self, step: SchedulerOutput, budget: int) -> None:
        """Let sequences in, in their order, while there are seats, blocks and budget."""
        while budget > 0 and len(self.running) < self.max_num_seqs and (waiting := self._next_waiting()):
            if waiting.status is Status.SWAPPED:
                if not self.blocks.swap_in(waiting):
                    return
                self._run(heapq.heappop(self._waiting)[1])
                continue
            if not self._take_blocks(waiting):
                return
            count = waiting.num_tokens - waiting.num_computed_tokens
            if count > budget and not self.chunked_prefill:
                self.blocks.free(waiting)
                return
            heapq.heappop(self._waiting)
            self._run(waiting)
            if waiting.num_output_tokens == 0 and waiting.index == 0:
                waiting.group.num_cached_tokens = waiting.num_computed_tokens
            budget -= self._schedule_chunk(step, waiting, budget)

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Give a waiting sequence blocks for all its tokens, so that its prompt is not cut off half-way."""
        reserved = self._num_reserved if self.running else 0
        if self.blocks.num_available <= reserved:
            return False
        self.blocks.take_prefix(sequence)
        count = sequence.num_tokens - sequence.num_computed_tokens
        room = self.blocks.num_available - reserved
        needed = self.blocks.blocks_for(sequence.num_tokens) - len(sequence.block_table.block_ids)
        if needed <= room and self.blocks.make_room(sequence, count):
            return True
        self.blocks.free(sequence)
        return False

    def _preempt_for_priority(self, step: SchedulerOutput) -> None:
        """Take the seats and blocks of less urgent sequences for a more urgent one that waits."""
        urgent = self._next_waiting()
        if urgent is None:
            return
        while self.running and self.running[-1].group.priority > urgent.group.priority:
            needed = self.blocks.blocks_for(urgent.num_tokens) + self._num_reserved
            if len(self.running) < self.max_num_seqs and needed <= self.blocks.num_available:
                return
            self._preempt(step, self.running[-1])

    def _preempt(self, step: SchedulerOutput, sequence: Sequence) -> None:
        """Take the blocks of a running sequence that the step does not compute."""
        self.running.pop(bisect_left(self.running, sequence.order, key=_order))
        step.preempted.append(sequence)
        self.num_preemptions += 1
        if self.swap and self.blocks.swap_out(sequence):
            self.add(sequence, Status.SWAPPED)
        else:
            self.blocks.free(sequence)
            self.add(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_order)
        if _has_prompt(sequence):
            self._prefilling.append(sequence)

    def _next_waiting(self) -> Sequence | None:
        while self._waiting and self._waiting[0][1].status is Status.FINISHED:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None


def _has_prompt(sequence: Sequence) -> bool:
    """Return whether more than one token is to be computed, or a prompt's last one that other samples start from."""
    return sequence.num_computed_tokens + 1 < sequence.num_tokens or not sequence.group.forked
