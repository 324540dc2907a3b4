"""Patches how vLLM's CPU build gives the drafts of a request its temperature, top-k and top-p.

Its C++ function writes into a copy, so that the drafts are checked with whatever the memory held: answers that are
sampled are wrong, and top-k ends the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moe_optimizer.vllm_plugin.patch import Patch

if TYPE_CHECKING:
    import torch


def expanded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return each request's value once for each of its drafts.

    Args:
        x: [requests], of any dtype.
        cu_num_tokens: [requests], integers: drafts up to and including each request.
        num_tokens: of all drafts.
        replace_from: a value to replace; with both left out none is.
        replace_to: what it becomes.

    Returns:
        [num_tokens], dtype of x.
    """
    import torch  # only where vLLM has: `doctor --drift` looks at the patch without it

    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1, dtype=torch.long))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)


def _replacement(original: Callable[..., torch.Tensor]) -> Callable[..., Any]:  # noqa: ARG001 - it is wrong there
    return expanded


DRAFT_SAMPLING = Patch(
    target="vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
    why="the CPU build's expand_kernel writes into a copy (vllm#42638): drafts are checked with values nobody wrote",
    remove_when="vLLM's CPU build checks drafts with the temperature of their request",
    fingerprints={"0.32": "b937d69dd008b317"},
    replacement=_replacement,
)
