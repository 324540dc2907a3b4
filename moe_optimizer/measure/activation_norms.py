"""Measures what the experts' matrices read on a text: python -m moe_optimizer.measure.activation_norms.

`sparsity_24.activation_norms` of a profile names the file that it writes. Runs the model in this process, on vLLM's CPU
build with our kernel.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer.errors import MoeOptimizerError
from moe_optimizer.measure.observed_text import add_arguments, check_arguments, observe_text
from moe_optimizer.specs.activation_norms import hidden_norms_name, input_norms_name

if TYPE_CHECKING:
    import torch

    from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall, KernelWeights


@dataclass(slots=True)
class _Squares:
    x: torch.Tensor
    """float64 [H]."""
    h: torch.Tensor
    """float64 [E, I]."""


class ActivationNorms:
    """Adds up, layer by layer, the squares of what the two projections read."""

    def __init__(self) -> None:
        self._layers: dict[int, _Squares] = {}

    def add(self, weights: KernelWeights, call: ExpertsCall) -> None:
        """Add the tokens of one call."""
        import torch

        experts, hidden, width = weights.w2.shape
        address = weights.w13.data_ptr()
        if address not in self._layers:
            self._layers[address] = _Squares(
                torch.zeros(hidden, dtype=torch.float64, device="cpu"),
                torch.zeros(experts, width, dtype=torch.float64, device="cpu"),
            )
        squares = self._layers[address]
        squares.x += call.x.double().square().sum(0)
        for expert in call.topk_ids.unique().tolist():
            tokens = (call.topk_ids == expert).any(-1)
            gate, up = (call.x[tokens].float() @ weights.w13[expert].float().T).chunk(2, dim=-1)
            squares.h[expert] += (torch.nn.functional.silu(gate) * up).double().square().sum(0)

    def by_address(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the norms [H] and [E, I] of each layer, float32, by the address of its w13.

        An expert that no token went to has ones: by them magnitude alone decides.
        """
        found = {}
        for address, squares in self._layers.items():
            unseen = ~squares.h.any(-1, keepdim=True)
            found[address] = squares.x.sqrt().float(), squares.h.sqrt().masked_fill(unseen, 1.0).float()
        return found


def measure(model: str, text: str, output: Path, *, name: str, max_tokens: int) -> int:
    """Run `text` through the model, write the norms of every layer and return the number of tokens.

    `name` is the model's in the file.

    Raises:
        UnsupportedError: our CPU kernel does not compute this model's experts here.
        OSError: `output` cannot be written.
    """
    norms = ActivationNorms()
    observed = observe_text(model, text, max_tokens=max_tokens, observe=norms.add)
    from safetensors.torch import save_file

    tensors = {}
    for address, (x, h) in norms.by_address().items():
        layer = observed.layer_index(address)
        tensors |= {input_norms_name(layer): x, hidden_norms_name(layer): h}
    metadata = {"model": name, "tokens": str(observed.tokens)}
    temporary = output.with_name(f".{output.name}.tmp")
    save_file(tensors, temporary, metadata=metadata)
    temporary.replace(output)
    return observed.tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        name, text = check_arguments(options)
        tokens = measure(options.model, text, options.output, name=name, max_tokens=options.max_tokens)
    except (OSError, MoeOptimizerError) as error:
        print(f"sparsity_norms: {error}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    print(f"{tokens} tokens; written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
