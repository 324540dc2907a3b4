"""`SchedulerOutput`: one step."""

from dataclasses import dataclass, field

from moe_optimizer.engine.block import Copies
from moe_optimizer.engine.sequence import Sequence


@dataclass(slots=True)
class SchedulerOutput:
    """What is copied before the step, and what it computes."""

    copies: Copies = field(default_factory=list)
    """Made one after the other, before any token is computed."""
    decodes: list[Sequence] = field(default_factory=list)
    """Sequences with one token to compute."""
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences with several, and how many of them the step computes."""
    sampled: list[Sequence] = field(default_factory=list)
    """The sequences that get a token: the decodes, and the prefills that reach their last token, in this order."""
    preempted: list[Sequence] = field(default_factory=list)

    def __str__(self) -> str:
        prompts = ", ".join(f"{count} of request {sequence.group.request_id}" for sequence, count in self.prefills)
        preempted = ", ".join(sequence.group.request_id for sequence in self.preempted)
        return (
            f"step: {len(self.decodes)} decodes, prompt tokens: {prompts or 'none'}, preempted: {preempted or 'none'}, "
            f"{len(self.copies)} blocks copied"
        )
