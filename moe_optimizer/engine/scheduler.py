"""`Scheduler`: which sequences the next step computes, and how many tokens of each."""

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
    continuous_batching: bool = True
    """Let sequences in while others run."""
    kv_cache: bool = True
    """Read what was computed before; else every step computes its sequences whole, as prompts."""
    running: list[Sequence] = field(default_factory=list)
    """In the order they are served."""
    waiting: list[Sequence] = field(default_factory=list)
    """For a seat, here or in host memory, in the same order."""
    num_preemptions: int = 0
    _prefilling: list[Sequence] = field(default_factory=list)
    """Running sequences with a prompt to compute; all others have one token."""

    def __post_init__(self) -> None:
        self._num_reserved = int(_RESERVED_SHARE * self.blocks.num_blocks)

    # Requests come and go

    def add(self, sequence: Sequence, status: Status = Status.WAITING) -> None:
        sequence.status = status
        insort(self.waiting, sequence, key=_order)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and its blocks back."""
        for queue in (self.running, self.waiting):
            place = bisect_left(queue, sequence.order, key=_order)
            if queue[place : place + 1] == [sequence]:
                del queue[place]
        sequence.status = Status.FINISHED
        self.blocks.free(sequence)

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
                    self.fork(sequence, other)
        if not self.kv_cache:
            self._prefilling = [*{*self._prefilling, *step.sampled}]
            for sequence in step.sampled:
                sequence.num_computed_tokens = 0

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Run a sequence of which `parent` has computed all but the last token; without a seat it waits like others."""
        if self.kv_cache and parent.status is Status.RUNNING and len(self.running) < self.max_num_seqs:
            self.blocks.fork(parent, child)
            self._run(child)
        else:
            self.add(child)

    def _schedule_decodes(self, step: SchedulerOutput) -> list[Sequence]:
        """Schedule every running sequence with one token to compute; return the others."""
        # Passes over all sequences are this function's time: those that need no block are not called for one by one.
        asking = [each for each in self.running if each.num_tokens > each.num_slots]
        for sequence in asking:
            if sequence.num_tokens == sequence.group.max_num_tokens:
                # Its last token is under way.
                self.finish(sequence)
        for sequence in asking:
            # At the cost of those served after it, or of itself.
            count = sequence.num_tokens - sequence.num_computed_tokens
            while sequence.status is Status.RUNNING and not self.blocks.make_room(sequence, count):
                self._preempt_last(step)
        self._prefilling = [each for each in self._prefilling if each.status is Status.RUNNING and _has_prompt(each)]
        others = set(self._prefilling)
        step.decodes = [each for each in self.running if each not in others] if others else self.running.copy()
        return sorted(others, key=_order)

    def _schedule_chunk(self, step: SchedulerOutput, sequence: Sequence, budget: int) -> int:
        """Schedule as much of a prompt as the budget allows, whose blocks it has; return how much."""
        count = sequence.num_tokens - sequence.num_computed_tokens
        if count > budget:
            count = budget if self.chunked_prefill else 0
        if count > 0:
            step.prefills.append((sequence, count))
        return count

    def _admit(self, step: SchedulerOutput, budget: int) -> None:
        """Let sequences in, in their order, while there are seats, blocks and budget."""
        seats = self.max_num_seqs if self.continuous_batching or not self.running else 0
        while budget > 0 and self.waiting and len(self.running) < seats:
            first = self.waiting[0]
            if first.status is Status.SWAPPED:
                if not self.blocks.swap_in(first):
                    return
                self._run(self.waiting.pop(0))
                continue
            if not self._take_blocks(first):
                return
            if first.num_tokens - first.num_computed_tokens > budget and not self.chunked_prefill:
                self.blocks.free(first)
                return
            self._run(self.waiting.pop(0))
            if first.num_output_tokens == 0 and first.index == 0:
                first.group.num_cached_tokens = first.num_computed_tokens
            budget -= self._schedule_chunk(step, first, budget)

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
        while self.waiting and self.running and self.running[-1].group.priority > self.waiting[0].group.priority:
            needed = self.blocks.blocks_for(self.waiting[0].num_tokens) + self._num_reserved
            if len(self.running) < self.max_num_seqs and needed <= self.blocks.num_available:
                return
            self._preempt_last(step)

    def _preempt_last(self, step: SchedulerOutput) -> None:
        """Take seat and blocks of the sequence that is served last, to host memory while there is room there."""
        sequence = self.running.pop()
        step.preempted.append(sequence)
        self.num_preemptions += 1
        if self.blocks.swap_out(sequence):
            self.add(sequence, Status.SWAPPED)
        else:
            self.blocks.free(sequence)
            self.add(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_order)
        if _has_prompt(sequence):
            self._prefilling.append(sequence)


def _has_prompt(sequence: Sequence) -> bool:
    """Return whether more than one token is to be computed, or a prompt's last one that other samples start from."""
    return sequence.num_computed_tokens + 1 < sequence.num_tokens or not sequence.group.forked
