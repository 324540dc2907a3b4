"""Says what a benchmark measures, and where its files are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_optimizer.errors import InputError
from moe_optimizer.measure.bench.result import Limits
from moe_optimizer.measure.bench.schedule import Turn
from moe_optimizer.measure.bench.side import Side
from moe_optimizer.measure.bench.texts import Texts, texts_of
from moe_optimizer.measure.bench.trace import Load, TraceRequest, draw, loads_of, moved
from moe_optimizer.measure.bench.workload import Workload
from moe_optimizer.measure.claimed_folder import claim_folder
from moe_optimizer.plan.json_codec import encode

_MEASUREMENT_APART = 100
"""Attempts that lie between the prompts of two measurements: more than there are at a round."""
_WARM_UP_ROUND = 1_000_000
"""Added to a round's number: requests of the warm-up are not those that count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """What to measure."""

    command: tuple[str, ...]
    """That asked for it, to be repeated."""
    sides: tuple[Side, ...]
    """One or two; `measure_sides` takes more."""
    workload_name: str
    workload: Workload | None
    trace: tuple[TraceRequest, ...] = ()
    """Replayed as it is, where there is no workload."""
    repetitions: int
    limits: Limits
    folder: Path
    """Gets traces, samples and the run folders; a run that was stopped goes on from what is there."""
    tokenizer: str
    trust_remote_code: bool
    ready_timeout_s: float
    asked_before: int = 0
    """Measurements that a server may have answered already: the prompts of this one are others, of the same lengths."""

    @property
    def loads(self) -> tuple[Load, ...]:
        """The points at which servers are measured."""
        return loads_of(self.workload) if self.workload is not None else (Load(),)

    @property
    def description(self) -> str:
        """What the requests are like."""
        return self.workload.description if self.workload is not None else f"{len(self.trace)} requests of a trace"

    @property
    def texts(self) -> Texts | None:
        """What prompts are taken from; None: random tokens, which judge no draft.

        Raises:
            InputError: the workload's file cannot be read.
        """
        return None if self.workload is None else texts_of(self.workload.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and completion together."""
        if self.workload is not None:
            return self.workload.longest
        return max(each.input_length + each.output_length for each in self.trace)

    @property
    def has_token_times(self) -> bool:
        """Whether a completion has two tokens, so that there is a time per output token."""
        if self.workload is not None:
            return any(kind.output.most > 1 for kind in self.workload.requests)
        return any(each.output_length > 1 for each in self.trace)

    def check_fits(self, name: str, max_model_len: int) -> None:
        """Refuse a server that takes no requests as long as these.

        Raises:
            InputError: it does not.
        """
        if max_model_len < self.longest:
            raise InputError(
                f"workload {self.workload_name}: has requests of up to {self.longest} tokens, but {name} takes "
                f"at most {max_model_len}",
                hint="choose another --workload",
            )

    @property
    def side_by_side(self) -> bool:
        """Whether all servers fit beside each other.

        A GPU's server takes the share of the memory that it is given (--gpu-memory-utilization), so two fit where both
        were given a part. A CPU's takes what it needs.
        """
        plans = [side.plan for side in self.sides if side.plan is not None]
        if len(self.sides) == 1:
            return True
        if any(plan.num_gpus for plan in plans):
            return sum(plan.memory.budget_bytes for plan in plans) <= plans[0].memory.total_bytes
        needed = sum((plan.memory.budget_bytes - plan.memory.unused_bytes) * plan.memory.num_devices for plan in plans)
        return all(needed <= plan.memory.budget_bytes for plan in plans)

    def requests(self, turn: Turn) -> tuple[TraceRequest, ...]:
        """Return the requests of one turn: alike for both sides, and other prompts in every repetition and attempt."""
        attempt = len(self.discarded(turn)) + _MEASUREMENT_APART * self.asked_before
        number = turn.repetition + (0 if turn.counted else _WARM_UP_ROUND)
        if self.workload is None:
            return moved(self.trace, number, attempt=attempt)
        shorter = {"requests_per_client": 1, "seconds": self.workload.seconds / 2}
        workload = self.workload if turn.counted else self.workload.model_copy(update=shorter)
        return draw(workload, turn.load, round_number=number, attempt=attempt)

    def samples_path(self, turn: Turn) -> Path:
        """Return the file of the samples of one turn."""
        return self.folder / f"{turn.key}.json"

    def discarded(self, turn: Turn) -> tuple[Path, ...]:
        """Return the samples of earlier attempts at a turn, which do not count: something compiled."""
        return tuple(sorted(self.folder.glob(f"{turn.key}.discarded-*.json")))

    def discard(self, turn: Turn) -> None:
        """Keep the samples of a turn, but not as those that count."""
        path = self.samples_path(turn)
        path.rename(path.with_suffix(f".discarded-{len(self.discarded(turn))}.json"))

    def claim_folder(self) -> None:
        """Create the folder, or take one in which the same benchmark was stopped.

        Raises:
            InputError: another benchmark's samples are there.
        """
        sides = [(side.name, side.url, side.served) for side in self.sides]
        workload = self.workload.model_dump() if self.workload is not None else None
        question: list[Any] = [sides, workload, encode(self.trace), self.tokenizer]
        if (texts := self.texts) is not None and texts.whole:
            question.append(texts.texts)
        claim_folder(self.folder, question, command="bench")
