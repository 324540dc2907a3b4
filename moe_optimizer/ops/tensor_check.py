"""Checks of tensors against an op's contract, with messages that name the tensor and the dimension."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError


def overlaps_shifted(out: Tensor, x: Tensor) -> bool:
    """Return whether two matrices with contiguous rows share memory without being the same rows.

    The CPU kernels write some tokens' rows before they read the last ones: right only where those are the same rows.
    """
    if out.numel() == 0 or (out.data_ptr(), out.stride()) == (x.data_ptr(), x.stride()):
        return False
    (out_begin, out_end), (x_begin, x_end) = _extent(out), _extent(x)
    return out_begin < x_end and x_begin < out_end


def _extent(matrix: Tensor) -> tuple[int, int]:
    begin = matrix.data_ptr()
    elements = (matrix.shape[0] - 1) * matrix.stride(0) + matrix.shape[1]
    return begin, begin + elements * matrix.element_size()


def _known(condition: bool | torch.SymBool) -> bool:
    """Return whether a condition on sizes holds for certain.

    While a graph is traced, a size may depend on data that is not there yet (a selection by a mask). What cannot be
    known then counts as not so; the op checks the real tensors again when the graph runs.
    """
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to import, for tracing only

    return guard_or_false(condition)


class TensorChecks:
    """Checks the tensors of one op call; symbolic dimensions are bound by the first tensor that has them.

    Every failed check raises TensorContractError: op, tensor, what, got, expected.
    """

    def __init__(self, op: str) -> None:
        self._op = op
        self._bound: dict[str, tuple[int, str]] = {}

    def shape(self, name: str, tensor: Tensor, *dims: str | int) -> None:
        """Check the rank and the dimensions; a str is a symbol, an int the size itself."""
        if tensor.dim() != len(dims):
            wanted = ", ".join(str(dim) for dim in dims)
            raise self.error(name, "dimensions", list(tensor.shape), f"{len(dims)} ([{wanted}])")
        for index, dim in enumerate(dims):
            got = tensor.shape[index]
            if not isinstance(dim, str):  # an int, or torch.SymInt while a graph is traced
                if _known(got != dim):
                    raise self.error(name, f"dim {index}", got, str(dim))
                continue
            size, origin = self._bound.setdefault(dim, (got, f"{name} dim {index}"))
            if _known(got != size):
                raise self.error(name, f"dim {index} ({dim})", got, f"{size} (bound by {origin})")

    def bind(self, symbol: str, size: int, origin: str) -> None:
        """Bind a symbol to a size that was computed from another tensor."""
        self._bound[symbol] = (size, origin)

    def dtype(self, name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
        """Check that the dtype is one of `dtypes`."""
        if tensor.dtype not in dtypes:
            raise self.error(name, "dtype", tensor.dtype, " or ".join(dict.fromkeys(str(dtype) for dtype in dtypes)))

    def expert_map(self, expert_map: Tensor | None) -> None:
        """Check a map from global to local experts, if there is one."""
        if expert_map is None:
            return
        self.shape("expert_map", expert_map, "global experts")
        self.dtype("expert_map", expert_map, torch.int32)
        # An empty tensor has no address, and to the kernels no address is no map: ids would count as local ones.
        if expert_map.shape[0] == 0:
            raise self.error("expert_map", "dim 0 (global experts)", 0, "at least 1")

    def routing(self, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> None:
        """Check what a router chose, and the map to local experts."""
        self.shape("topk_ids", topk_ids, "T", "k")
        self.dtype("topk_ids", topk_ids, torch.int32, torch.int64)
        self.shape("topk_weights", topk_weights, "T", "k")
        self.dtype("topk_weights", topk_weights, torch.float32)
        self.expert_map(expert_map)

    def tokens(self, name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
        """Check [T, H] with contiguous rows: the input or the output."""
        self.shape(name, tensor, "T", "H")
        self.dtype(name, tensor, *dtypes)
        self.contiguous_rows(name, tensor)

    def devices(self, tensors: Mapping[str, object], device: torch.device) -> None:
        """Check that all tensors among the named arguments lie on `device`."""
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and tensor.device != device:
                raise self.error(name, "device", tensor.device, f"{device} (bound by x)")

    def contiguous_rows(self, name: str, tensor: Tensor) -> None:
        """Check that the last dimension is contiguous and that no dimension overlaps or runs backwards."""
        if _known(tensor.numel() == 0):
            return
        if _known(tensor.shape[-1] > 1) and _known(tensor.stride(-1) != 1):
            raise self.error(name, "stride of the last dimension", tensor.stride(-1), "1")
        for index in range(tensor.dim() - 1):
            smallest = tensor.shape[-1]
            if _known(tensor.shape[index] > 1) and _known(tensor.stride(index) < smallest):
                raise self.error(name, f"stride of dim {index}", tensor.stride(index), f"at least {smallest}")

    def error(self, name: str, what: str, got: object, expected: str) -> TensorContractError:
        """Return the error for one failed check."""
        return TensorContractError(f"{self._op}: {name} {what}: got {got}, expected {expected}")
