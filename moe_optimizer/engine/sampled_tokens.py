"""`SampledTokens`: what was chosen for the sequences of a step, which the device may still compute.

Legend: S sequences, R those of which log-probabilities are reported, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_optimizer.engine.outputs import Logprob


class SampledTokens:
    """Token ids [S] on the device, and on their way to the host, ahead of what the device is given later.

    Of the rows `reported`, each with its number of likely tokens, `logprobs` are on the device: value [R]
    and rank [R] (from 0) of the chosen tokens, values [R, K] and ids [R, K] of the likeliest.
    """

    def __init__(
        self, token_ids_S: Tensor, reported: Sequence[tuple[int, int]] = (), logprobs: Sequence[Tensor] = ()
    ) -> None:
        self.token_ids_S, self._reported, self._made = token_ids_S, reported, None
        # To pinned memory from a GPU.
        self._on_host = [each.to("cpu", non_blocking=each.is_cuda) for each in (token_ids_S, *logprobs)]
        if token_ids_S.is_cuda:
            self._made = torch.cuda.current_stream(token_ids_S.device).record_event()

    @classmethod
    def of(cls, token_ids: list[int]) -> SampledTokens:
        return cls(torch.tensor(token_ids, dtype=torch.int64))

    def read(self) -> tuple[list[int], dict[int, dict[int, Logprob]]]:
        """Wait for the device; return the token ids, and by row the log-probabilities that are reported."""
        if self._made is not None:
            self._made.synchronize()
        token_ids, *logprobs = (each.tolist() for each in self._on_host)
        found = {}
        for (row, count), value, rank, values, ids in zip(self._reported, *logprobs, strict=True):
            likely = enumerate(zip(ids[:count], values, strict=False), 1)
            found[row] = {token_id: Logprob(each, place) for place, (token_id, each) in likely}
            found[row].setdefault(token_ids[row], Logprob(value, rank + 1))
        return token_ids, found
