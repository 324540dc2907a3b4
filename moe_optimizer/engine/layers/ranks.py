"""`Ranks`: the processes that share a model, and what they tell each other in a layer."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optimizer.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of this process among those of torch.distributed; alone without arguments."""

    rank: int = 0
    size: int = 1
    expert_parallel: bool = False
    """Whole experts on each rank instead of a slice of each."""

    def share(self, count: int, what: str) -> int:
        """Return this rank's part of `count`, which has to divide."""
        if count % self.size:
            raise UnsupportedError(f"tensor_parallel_size: got {self.size}, expected a divisor of the {count} {what}")
        return count // self.size

    def sum(self, x: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def least(self, number: int) -> int:
        if self.size == 1:
            return number
        smallest = torch.tensor(number, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def gather(self, x: Tensor) -> Tensor:
        """Put the ranks' tensors beside each other, along the last dimension."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def slice_of(self, tensor: Tensor, dim: int, length: int) -> Tensor:
        """Return this rank's `length` of a checkpoint's tensor; ranks share a slice where there are fewer slices."""
        if self.size == 1 or length > tensor.shape[dim]:
            return tensor
        return tensor.narrow(dim, self.rank * tensor.shape[dim] // self.size // length * length, length)


ALONE = Ranks()
