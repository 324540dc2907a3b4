"""Measures the norms of what the experts' matrices read on a text: a process of its own, see `measure.process`.

Runs the model on vLLM's CPU build with our kernel.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer.measure.observed_text import TextRequest, observe_text
from moe_optimizer.measure.process import OnStep, answer_request
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

    def add(self, layer: int, weights: KernelWeights, call: ExpertsCall) -> None:
        """Add the tokens of one call; rows of padding have no expert (id -1)."""
        import torch

        experts, hidden, width = weights.w2.shape
        if layer not in self._layers:
            self._layers[layer] = _Squares(
                torch.zeros(hidden, dtype=torch.float64, device="cpu"),
                torch.zeros(experts, width, dtype=torch.float64, device="cpu"),
            )
        squares = self._layers[layer]
        squares.x += call.x[(call.topk_ids >= 0).any(-1)].double().square().sum(0)
        for expert in call.topk_ids[call.topk_ids >= 0].unique().tolist():
            tokens = (call.topk_ids == expert).any(-1)
            gate, up = (call.x[tokens].float() @ weights.w13[expert].float().T).chunk(2, dim=-1)
            squares.h[expert] += (torch.nn.functional.silu(gate) * up).double().square().sum(0)

    def by_layer(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the norms [H] and [E, I] of each layer, float32.

        An expert that no token reached has ones, with which magnitude alone decides.
        """
        found = {}
        for layer, squares in self._layers.items():
            unseen = ~squares.h.any(-1, keepdim=True)
            found[layer] = squares.x.sqrt().float(), squares.h.sqrt().masked_fill(unseen, 1.0).float()
        return found


def measure(request: TextRequest, on_step: OnStep) -> int:
    """Run the text through the model, write the norms of every layer and return the number of tokens."""
    on_step(0.0, "starting vLLM")
    norms = ActivationNorms()
    tokens = observe_text(request, norms.add)
    from safetensors.torch import save_file

    tensors = {}
    for layer, (x, h) in norms.by_layer().items():
        tensors |= {input_norms_name(layer): x, hidden_norms_name(layer): h}
    output = Path(request.output)
    temporary = output.with_name(f".{output.name}.tmp")
    save_file(tensors, temporary, metadata={"model": request.name, "tokens": str(tokens)})
    temporary.replace(output)
    return tokens


if __name__ == "__main__":
    sys.exit(answer_request(TextRequest, sys.argv[1:], measure))
