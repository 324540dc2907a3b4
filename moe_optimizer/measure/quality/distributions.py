"""Holds the next-token distributions that a server gave, as far as it tells them: the likeliest tokens of each."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_optimizer.files import read_bytes, write_atomically

_MAX_BYTES = 2 << 30
ABSENT = -1
"""Token id of an empty place: a row with fewer tokens than another."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Distributions:
    """P positions, of each the log-probabilities of up to K tokens; the rest of its mass is known as a sum alone."""

    token_ids: NDArray[np.int32]
    """[P, K]; ABSENT where a row has fewer."""
    logprobs: NDArray[np.float64]
    """[P, K]; minus infinity where a row has fewer. NaN is kept: it is what the server computed."""
    next_ids: NDArray[np.int32]
    """[P], the token that follows in the text, or that the server chose."""
    next_logprobs: NDArray[np.float64]
    """[P], of that token."""
    sequences: NDArray[np.int32]
    """[P], ascending: the number of the prompt that a position belongs to."""

    def __len__(self) -> int:
        return len(self.next_ids)

    def of_sequences(self, count: int) -> Distributions:
        """Return the positions of the first `count` prompts."""
        return self.at(np.flatnonzero(self.sequences < count))

    def at(self, places: NDArray[Any]) -> Distributions:
        """Return some of the positions."""
        return Distributions(
            token_ids=self.token_ids[places],
            logprobs=self.logprobs[places],
            next_ids=self.next_ids[places],
            next_logprobs=self.next_logprobs[places],
            sequences=self.sequences[places],
        )

    def write(self, path: Path) -> None:
        """Write a file that `read` reads."""
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            next_ids=self.next_ids,
            next_logprobs=self.next_logprobs,
            sequences=self.sequences,
        )
        write_atomically(path, buffer.getvalue())

    @staticmethod
    def read(path: Path) -> Distributions:
        """Read a file that `write` has written."""
        with np.load(io.BytesIO(read_bytes(path, max_bytes=_MAX_BYTES)), allow_pickle=False) as data:
            return Distributions(**{name: data[name] for name in data.files})


Row = tuple[Mapping[int, float], int, int]
"""Log-probability by token id, the token that follows, the number of the prompt."""


def distributions(rows: Sequence[Row]) -> Distributions:
    """Return rows as arrays; each row has the token that follows among its tokens."""
    widest = max((len(logprobs) for logprobs, _, _ in rows), default=0)
    token_ids = np.full((len(rows), widest), ABSENT, dtype=np.int32)
    values = np.full((len(rows), widest), -np.inf)
    for number, (logprobs, _, _) in enumerate(rows):
        token_ids[number, : len(logprobs)] = list(logprobs)
        values[number, : len(logprobs)] = list(logprobs.values())
    return Distributions(
        token_ids=token_ids,
        logprobs=values,
        next_ids=np.array([token for _, token, _ in rows], dtype=np.int32),
        next_logprobs=np.array([logprobs[token] for logprobs, token, _ in rows], dtype=np.float64),
        sequences=np.array([sequence for _, _, sequence in rows], dtype=np.int32),
    )
