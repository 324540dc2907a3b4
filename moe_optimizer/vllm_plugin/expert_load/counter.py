"""Counts routed tokens: on CUDA without reading device data on the host, on the CPU beside the compiled model.

A step gives the number of its rows that are tokens; the rows after them are padding of a CUDA graph. Before the first
served step nothing is counted: not profiling, warm-up and graph capture.

Tensors: L layers, E experts, T rows of a step, K experts of a token. In a table expert e counts in column e + 1; ids
below 0, which the router dropped, count in column 0, and ids from E on, which are experts that compute nothing, in
column E + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_NEVER_RAN = np.iinfo(np.int32).min


class LayerwiseCounter:
    """Keeps the ids of a step's layers and counts them after it: for the CPU, where vLLM compiles the router into its
    graph. To keep them is a part of a loop that is there; to count them in the graph, a call of torch for each layer,
    took 10 to 20 us.

    Each layer has a tensor of its own, which is an argument of the graph. The compiler would copy slices of one, and a
    layer number in the graph would make every layer's graph a different one.

    Args:
        top_k: the most experts of a token.
        max_rows: the most rows that a step has.
    """

    def __init__(self, layer_ids: Sequence[int], num_experts: int, *, top_k: int, max_rows: int) -> None:
        self._num_rows, self._num_experts = 0, num_experts
        self._ids = np.full((len(layer_ids), max_rows, top_k), _NEVER_RAN, np.int32)
        # The layers' memory lies side by side, yet to torch they are different storages.
        self._kept = {layer_id: torch.from_numpy(self._ids[place]) for place, layer_id in enumerate(layer_ids)}
        self._counts = np.zeros((len(layer_ids), num_experts + 2), np.int64)
        self._first_columns = np.arange(len(layer_ids))[:, None, None] * self._counts.shape[1] + 1

    def count_rows(self, num_rows: int) -> None:
        """Let the next `step_ended` count the first `num_rows` rows."""
        self._num_rows = num_rows

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Keep the logical expert ids [T, K] that a layer's router chose; vLLM calls it in every forward."""
        self._kept[layer_id][: topk_ids.shape[0], : topk_ids.shape[1]].copy_(topk_ids)

    def step_ended(self) -> None:
        """Count what the layers of this step have kept."""
        kept = self._ids[:, : self._num_rows]
        # Of few ids numpy's clip takes 10 us longer.
        columns = np.minimum(np.maximum(kept, -1), self._num_experts) + self._first_columns
        self._counts += np.bincount(columns.ravel(), minlength=self._counts.size).reshape(self._counts.shape)
        # A layer that does not run in the next step, or chooses fewer experts, is not counted again.
        np.minimum(kept, -1, out=kept)

    def table(self) -> torch.Tensor:
        """Return a copy of the table: int64 [L, E + 2]. A layer that ran, in a step or not, has a count in column 0."""
        table = torch.from_numpy(self._counts.copy())
        table[:, 0] += torch.from_numpy(self._ids[:, 0, 0] != _NEVER_RAN)
        return table


class StepwiseCounter:
    """Keeps the ids of a step's layers and counts them after the last one: for CUDA.

    A decode step takes a few milliseconds, and a launch in each of its layers would be a percent or two of that; this
    takes six launches in all. vLLM runs the router outside of its compiled graphs there, so Python may keep state.

    Args:
        max_rows: the most rows that a step is known to have; with more, counting takes one more launch.
    """

    def __init__(self, layer_ids: Sequence[int], num_experts: int, device: torch.device, *, max_rows: int) -> None:
        self._limit = torch.zeros((), dtype=torch.int64, device=device)
        self._num_experts = num_experts
        self._positions = {layer_id: position for position, layer_id in enumerate(layer_ids)}
        self._counts = torch.zeros(len(layer_ids), num_experts + 2, dtype=torch.int64, device=device)
        self._rows = torch.arange(max_rows, device=device)
        # Of dimension 1: it then decides the type of a sum with smaller integers.
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._step: dict[int, torch.Tensor] = {}
        self._captured: list[tuple[torch.Tensor, ...]] = []
        self._stream: torch.cuda.Stream | None = None
        self._reader: tuple[torch.cuda.Stream, torch.cuda.Event, torch.Tensor] | None = None

    def count_rows(self, num_rows: int) -> None:
        """Let the next forward on the current stream count its first `num_rows` rows."""
        if self._limit.is_cuda and self._stream is None:
            self._stream = torch.cuda.current_stream(self._limit.device)
        self._limit.fill_(num_rows)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Keep a layer's ids; with those of the last layer, count all."""
        position = self._positions[layer_id]
        self._step[position] = topk_ids
        if position < len(self._positions) - 1:
            return
        step, self._step = self._step, {}
        if len(step) == len(self._positions) and len({ids.shape for ids in step.values()}) == 1:
            self._add(torch.stack([step[each] for each in range(len(step))]), self._counts)
        else:
            for each, ids in step.items():
                self._add(ids.unsqueeze(0), self._counts[each : each + 1])
        if topk_ids.is_cuda and torch.cuda.is_current_stream_capturing():
            # A replay writes the ids where the capture did. If they were freed, a later layer would overwrite them
            # before they are counted.
            self._captured.append(tuple(step.values()))

    def _add(self, topk_ids: torch.Tensor, counts: torch.Tensor) -> None:
        """Add ids [L, T, K] to counts [L, E + 2]; rows from the limit on count in column 0."""
        num_rows = topk_ids.shape[1]
        within = num_rows <= self._rows.shape[0]
        rows = self._rows[:num_rows] if within else torch.arange(num_rows, device=counts.device)
        columns = (topk_ids + self._one).clamp_(0, self._num_experts + 1).mul_((rows < self._limit).unsqueeze(-1))
        columns = columns.view(columns.shape[0], -1)
        counts.scatter_add_(1, columns, self._one.expand(columns.shape))

    def step_ended(self) -> None:
        """Nothing is left to do: the device counts after the last layer."""

    def table(self) -> torch.Tensor:
        """Return a copy of the table on the host, after everything that was launched before the call.

        Called from another thread than the forward's, it waits on a stream of its own, for an event: a copy to memory
        that is not pinned waits inside the driver, where the forward's launches may have to wait too.
        """
        if self._stream is None:
            return self._counts.cpu().clone()
        with torch.cuda.device(self._counts.device):
            if self._reader is None:
                pinned = torch.empty(self._counts.shape, dtype=self._counts.dtype, device="cpu", pin_memory=True)
                self._reader = torch.cuda.Stream(), torch.cuda.Event(blocking=True), pinned
            reader, copied, table = self._reader
            reader.wait_stream(self._stream)
            with torch.cuda.stream(reader):
                table.copy_(self._counts, non_blocking=True)
                copied.record()
            copied.synchronize()
            return table.clone()


ExpertCounter = LayerwiseCounter | StepwiseCounter
"""Counts the tokens of all layers of one process."""
