"""Orders the rounds of a benchmark so that what changes with time strikes both sides alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_optimizer.measure.bench.trace import Load


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of requests: whose, under which load, and in which repetition."""

    side: int
    load: Load
    repetition: int
    counted: bool = True
    """False for a warm-up."""

    @property
    def key(self) -> str:
        """A name for files, equal in every run with the same arguments."""
        load = str(self.load).replace(" ", "-").replace("/", "-per-")
        return f"side-{self.side}_{load}_{self.repetition}{'' if self.counted else '_warm-up'}"


def sides_in_turn(repetition: int, num_sides: int) -> Sequence[int]:
    """Return the order of the sides in one repetition: the one that went first goes last in the next."""
    order = range(num_sides)
    return tuple(order) if repetition % 2 == 0 else tuple(reversed(order))


def together(loads: Sequence[Load], repetitions: int, num_sides: int) -> Iterator[Turn]:
    """Yield the turns of servers that are all up: warm-up, then each load of each repetition side by side."""
    for side in range(num_sides):
        yield from (Turn(side, load, 0, counted=False) for load in loads)
    for repetition in range(repetitions):
        for load in loads:
            yield from (Turn(side, load, repetition) for side in sides_in_turn(repetition, num_sides))


def alone(loads: Sequence[Load], repetition: int, side: int) -> Iterator[Turn]:
    """Yield the turns of one start of one server: warm-up, then each load once."""
    yield from (Turn(side, load, repetition, counted=False) for load in loads)
    yield from (Turn(side, load, repetition) for load in loads)
