"""The parts of the engine that can be swapped, each as what the others need of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from moe_optimizer.engine.kv_cache import CacheSize
from moe_optimizer.engine.outputs import SampledToken
from moe_optimizer.engine.scheduler_output import Copies, SchedulerOutput
from moe_optimizer.engine.sequence import Sequence

# ruff: noqa: D102  (the implementations document the methods)


class BlockManager(Protocol):
    """Holds the KV cache's blocks. See `block_manager.BlockManager`."""

    block_size: int

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_available(self) -> int: ...
    def blocks_for(self, num_tokens: int) -> int: ...
    def take_prefix(self, sequence: Sequence) -> None: ...
    def publish(self, sequence: Sequence) -> None: ...
    def make_room(self, sequence: Sequence, num_tokens: int, copies: Copies) -> bool: ...
    def fork(self, parent: Sequence, child: Sequence) -> None: ...
    def free(self, sequence: Sequence) -> None: ...
    def swap_out(self, sequence: Sequence, copies: Copies) -> bool: ...
    def swap_in(self, sequence: Sequence, copies: Copies) -> bool: ...
    def check_integrity(self, sequences: Iterable[Sequence]) -> None: ...


class Scheduler(Protocol):
    """Decides what each step computes. See `scheduler.Scheduler`."""

    blocks: BlockManager
    running: list[Sequence]
    num_preemptions: int

    @property
    def has_unfinished(self) -> bool: ...
    @property
    def num_waiting(self) -> int: ...
    def add(self, sequence: Sequence) -> None: ...
    def fork(self, parent: Sequence, child: Sequence) -> None: ...
    def finish(self, sequence: Sequence) -> None: ...
    def schedule(self) -> SchedulerOutput: ...
    def commit(self, step: SchedulerOutput) -> None: ...


class Executor(Protocol):
    """Computes steps: `ModelRunner` in this process, or something that drives several."""

    cache_size: CacheSize

    def execute(self, step: SchedulerOutput) -> list[SampledToken]: ...


class Sampler(Protocol):
    """Chooses a token for each row of logits [S, V] (float32), which it may overwrite."""

    def sample(self, logits_SV: Tensor, sequences: list[Sequence]) -> list[SampledToken]: ...
