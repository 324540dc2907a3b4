"""Elements picked row by row, as positions in the flattened array: several times faster than numpy's own way."""

# B rows, X and Y columns.
# ruff: noqa: N803

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)


def flat_positions(column_BY: Ids, num_columns: int) -> Ids:
    """Return the positions of elements in a flattened [B, `num_columns`] array: [B, Y]."""
    return column_BY + np.arange(0, len(column_BY) * num_columns, num_columns)[:, None]


def pick(values_BX: NDArray[_Scalar], column_BY: Ids) -> NDArray[_Scalar]:
    """Return values[b, column[b, y]]: [B, Y], as `np.take_along_axis(..., axis=1)`."""
    return values_BX.ravel().take(flat_positions(column_BY, values_BX.shape[1]))
