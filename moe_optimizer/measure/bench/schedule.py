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


@dataclass(frozen=True, slots=True)
class Start:
    """Servers that are started together, and what is sent to them before they are stopped."""

    sides: tuple[int, ...]
    keys: tuple[str, ...]
    """A name for the files of each side's start."""
    turns: tuple[Turn, ...]

    @property
    def keyed(self) -> tuple[tuple[int, str], ...]:
        """Each side with the name for the files of its start."""
        return tuple(zip(self.sides, self.keys, strict=True))


def starts(loads: Sequence[Load], repetitions: int, num_sides: int, *, side_by_side: bool) -> tuple[Start, ...]:
    """Return the parts of a benchmark in order.

    Side by side, each load is sent to one side and then at once to the other. Else each repetition starts a server of
    each side; the side that went first goes last in the next. Every start begins with a warm-up that is not counted.
    """
    sides = tuple(range(num_sides))
    if side_by_side:
        turns = [
            *(Turn(side, load, 0, counted=False) for side in sides for load in loads),
            *(Turn(side, load, each) for each in range(repetitions) for load in loads for side in _order(sides, each)),
        ]
        return (Start(sides, tuple(f"server-{side}" for side in sides), tuple(turns)),)
    return tuple(
        Start((side,), (f"server-{side}_{each}",), tuple(_alone(loads, each, side)))
        for each in range(repetitions)
        for side in _order(sides, each)
    )


def _order(sides: Sequence[int], repetition: int) -> Sequence[int]:
    return sides if repetition % 2 == 0 else sides[::-1]


def _alone(loads: Sequence[Load], repetition: int, side: int) -> Iterator[Turn]:
    yield from (Turn(side, load, repetition, counted=False) for load in loads)
    yield from (Turn(side, load, repetition) for load in loads)
