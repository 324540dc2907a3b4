"""Sorts rows and picks from them, several times faster than numpy's own functions for it."""

# B rows, X and Y columns.

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)


def flat_positions(column_BY: Ids, num_columns: int) -> Ids:
    """Return the positions of elements in a flattened [B, `num_columns`] array: [B, Y]."""
    return column_BY + np.arange(0, len(column_BY) * num_columns, num_columns)[:, None]


def pick(values_BX: NDArray[_Scalar], column_BY: Ids) -> NDArray[_Scalar]:
    """Return values[b, column[b, y]]: [B, Y], as `np.take_along_axis(..., axis=1)`."""
    return values_BX.ravel().take(flat_positions(column_BY, values_BX.shape[1]))


def ascending(values_BX: NDArray[np.floating]) -> Ids:
    """Return the columns of each row in ascending order of their values; of equals the first comes first: [B, X].

    The same as a stable sort and up to twice as fast, because it puts runs of equals in order only where there are any.
    numpy's default sort leaves them in an order that depends on the vector instructions of the CPU.
    """
    num_columns = values_BX.shape[1]
    order = np.argsort(values_BX, axis=1)
    in_order_BX = pick(values_BX, order)
    differs = in_order_BX[:, 1:] != in_order_BX[:, :-1]
    if not differs.all():
        run = np.zeros_like(order)
        np.cumsum(differs, axis=1, out=run[:, 1:])
        run *= num_columns
        order = np.sort(order + run, axis=1) - run
    return order
