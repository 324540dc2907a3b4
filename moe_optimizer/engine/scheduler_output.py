"""`SchedulerOutput`: one step."""

from dataclasses import dataclass, field

from moe_optimizer.engine.sequence import Sequence

Copies = list[tuple[int, int]]
"""(from, to) block numbers."""


@dataclass(slots=True)
class SchedulerOutput:
    """What is moved before the step, and what it computes.

    The moves are made in the order of the fields, before any token is computed.
    """

    swap_out: Copies = field(default_factory=list)
    """(device block, host block)"""
    copies: Copies = field(default_factory=list)
    """(device block, device block)"""
    swap_in: Copies = field(default_factory=list)
    """(host block, device block)"""
    decodes: list[Sequence] = field(default_factory=list)
    """Sequences with one token to compute."""
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences with several, and how many of them the step computes."""
    sampled: list[Sequence] = field(default_factory=list)
    """The sequences that get a token: the decodes, and the prefills that reach their last token, in this order."""
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(count for _, count in self.prefills)
