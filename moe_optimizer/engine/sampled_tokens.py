"""`SampledTokens`: what was chosen for the sequences of a step, which the device may still compute.

Legend: S sequences, R sequences of which log-probabilities are reported, K most likely tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optimizer.engine.outputs import Logprob, TokenLogprobs
from moe_optimizer.engine.transfer import Download


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """The log-probabilities of some rows of a step."""

    rows: list[int]
    num_shown: list[int | None]
    """Most likely tokens that each of them shows; None shows none, nor its own."""
    values_R: Tensor
    """Of the chosen tokens."""
    ranks_R: Tensor
    """Tokens that are more likely than the chosen one."""
    best_values_RK: Tensor
    best_ids_RK: Tensor


class SampledTokens:
    """Token ids [S] on the device; on their way to the host."""

    def __init__(self, token_ids_S: Tensor, reported: Reported | None = None) -> None:
        self.token_ids_S, self._reported = token_ids_S, reported
        more = () if reported is None else (
            reported.values_R, reported.ranks_R, reported.best_values_RK, reported.best_ids_RK,
        )  # fmt: skip
        self._download = Download([token_ids_S, *more])

    @classmethod
    def of(cls, token_ids: list[int]) -> "SampledTokens":
        return cls(torch.tensor(token_ids, dtype=torch.int64))

    def read(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Wait for the device; return the token ids, and by row the log-probabilities of those that report them."""
        token_ids, *more = (each.tolist() for each in self._download.wait())
        if (reported := self._reported) is None:
            return token_ids, {}
        logprobs = {}
        for row, num_shown, value, rank, best_values, best_ids in zip(
            reported.rows, reported.num_shown, *more, strict=True
        ):
            shown = None
            if num_shown is not None:
                pairs = zip(best_ids[:num_shown], best_values, strict=False)
                shown = {other: Logprob(likely, place) for place, (other, likely) in enumerate(pairs, 1)}
                shown.setdefault(token_ids[row], Logprob(value, rank + 1))
            logprobs[row] = TokenLogprobs(value, shown)
        return token_ids, logprobs
