"""Counts routed tokens on the device, without reading device data on the host.

A step gives `limit`, the number of its rows that are tokens; the rows after them are padding of a CUDA graph.
Before the first served step it is 0, so profiling, warm-up and graph capture run the counting and add nothing. It is a
tensor, because a compiled or captured graph must read it when it runs.

Tensors: L layers, E experts, T rows of a step, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def expert_columns(topk_ids: torch.Tensor, limit: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the table's column for every id of [..., T, K], as int64.

    Expert e counts in column e + 1. Rows from `limit` on and ids below 0, which the router dropped, count in column 0;
    ids from E on, which are experts that compute nothing, in column E + 1.
    """
    rows = torch.arange(topk_ids.shape[-2], device=topk_ids.device).unsqueeze(-1)
    return torch.where(rows < limit, topk_ids.clamp(-1, num_experts), -1).to(torch.int64) + 1


class LayerwiseCounter:
    """Adds to the table in every layer: for the CPU, where vLLM compiles the router into its graph.

    Each layer has a tensor of its own, which is an argument of the graph. The compiler would copy slices of one table,
    and a layer number in the graph would make every layer's graph a different one.
    """

    def __init__(self, layer_ids: Sequence[int], num_experts: int) -> None:
        self._limit = torch.zeros((), dtype=torch.int64)
        self._num_experts = num_experts
        self._counts = {layer_id: torch.zeros(num_experts + 2, dtype=torch.int64) for layer_id in layer_ids}

    def count_rows(self, num_rows: int) -> None:
        """Let the next forward count its first `num_rows` rows."""
        self._limit.fill_(num_rows)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Count the logical expert ids [T, K] that a layer's router chose; vLLM calls it in every forward."""
        columns = expert_columns(topk_ids, self._limit, self._num_experts).reshape(-1)
        self._counts[layer_id].scatter_add_(0, columns, torch.ones_like(columns))

    def table(self) -> torch.Tensor:
        """Return a copy of the table on the host: int64 [L, E + 2], see `expert_columns`."""
        return torch.stack(list(self._counts.values()))


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
        """Add ids [L, T, K] to counts [L, E + 2], in the columns of `expert_columns` but with fewer launches."""
        num_rows = topk_ids.shape[1]
        within = num_rows <= self._rows.shape[0]
        rows = self._rows[:num_rows] if within else torch.arange(num_rows, device=counts.device)
        columns = (topk_ids + self._one).clamp_(0, self._num_experts + 1).mul_((rows < self._limit).unsqueeze(-1))
        columns = columns.view(columns.shape[0], -1)
        counts.scatter_add_(1, columns, self._one.expand(columns.shape))

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
