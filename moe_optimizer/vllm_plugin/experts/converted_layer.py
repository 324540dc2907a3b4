"""Keeps a converted layer right when vLLM gives it new weights.

vLLM loads new weights (`reload_weights`, a weight update) into fresh tensors as the checkpoint stores them, has the
layer's method process them, and copies every parameter of the result into the one of that name that was there before:
compiled graphs keep their addresses. So all that a kernel reads of a converted layer is a parameter with a name of its
own, and processing converts once more. vLLM itself would only copy BF16 into FP8 weights under the old scales.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.model_executor.utils import replace_parameter

from moe_optimizer.errors import InputError
from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights

_HINT = "use reload_weights, which converts them once more, or serve with the pass that converts them off"


def put_weights(layer: Any, weights: KernelWeights) -> None:
    """Make converted weights the parameters of vLLM's layer."""
    for name, tensor in weights.parameters.items():
        replace_parameter(layer, name, tensor)
        getattr(layer, name).weight_loader = functools.partial(_refuse_loading, layer)


def convert_when_loaded_again(layer: Any, weights: KernelWeights, convert: Callable[[Any], KernelWeights]) -> None:
    """Have new weights of a converted layer converted, too.

    Args:
        layer: vLLM's, with its quantisation method.
        weights: what its parameters are now; the kernel keeps reading these tensors.
        convert: returns the layer's new weights, which it has as the checkpoint stores them.
    """
    method = getattr(layer, "quant_method", None)
    if method is None:
        return
    process = method.process_weights_after_loading

    @functools.wraps(process)
    def process_weights_after_loading(loaded: Any) -> None:
        if loaded is not layer:
            process(loaded)
        # vLLM asks again after the last layer: then the weights are still those that were converted.
        elif loaded.w13_weight.data_ptr() != weights.w13.data_ptr():
            put_weights(loaded, convert(loaded))

    method.process_weights_after_loading = process_weights_after_loading


def is_converted(layer: Any) -> bool:
    """Return whether the weights of vLLM's layer were put there by `put_weights`."""
    loader = getattr(getattr(layer, "w13_weight", None), "weight_loader", None)
    return isinstance(loader, functools.partial) and loader.func is _refuse_loading


def refuse_kernel_format(layers: int) -> InputError:
    """Return the refusal of new weights that bypass the conversion of this many layers."""
    return InputError(
        f"new weights: got tensors to be copied into the parameters, expected those of a checkpoint: "
        f"{layers} layers have their experts in another format than it",
        hint=_HINT,
    )


def _refuse_loading(layer: Any, *_arguments: Any, expert_id: int | None = None, **named: Any) -> bool | None:
    """Refuse a tensor of a checkpoint for a parameter that holds converted weights.

    A layer is converted as soon as all its own experts are there; while the model is loaded, vLLM still offers it those
    of other ranks, which its own loader passes over too.
    """
    if expert_id is not None and layer._map_global_expert_id_to_local_expert_id(expert_id) == -1:
        return False if named.get("return_success") else None
    raise InputError("new weights of converted experts: got a single tensor, expected a reload", hint=_HINT)
