"""Lists the MoE backends of the installed vLLM that compute a layer, and builds the experts of one as a server does.

Which there are, which one vLLM takes by itself and why it refuses another are the answers of its own oracles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_args

import torch
from vllm.config.kernel import MoEBackend
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle import fp8, unquantized

from moe_optimizer.errors import described
from moe_optimizer.specs.kernel_speeds import STOCK_BACKENDS

if TYPE_CHECKING:
    from moe_optimizer.measure.kernel_speeds.measured_layer import MeasuredLayer

_AUTO = "auto"
Choice = tuple[Any, Any]
"""vLLM's member of an enumeration of backends, and its experts class."""


@dataclasses.dataclass(frozen=True, slots=True)
class Backends:
    """vLLM's backends for one layer, under the names of --moe-backend."""

    taken: str
    """The one that vLLM takes by itself."""
    usable: Mapping[str, Choice]
    """Those that compute the layer, without the one that computes beside ours."""
    unavailable: Mapping[str, str]
    """Those for such weights that vLLM refuses here -> why."""


def backends_for(layer: MeasuredLayer) -> Backends:
    """Return what vLLM's oracle for the layer's weights says of each backend.

    Raises:
        Exception: what the oracle raises where it has no backend at all for the layer.
    """
    usable: dict[str, Choice] = {}
    unavailable: dict[str, str] = {}
    by_member: dict[Any, str] = {}
    for name in (each for each in get_args(MoEBackend) if each != _AUTO):
        member = _member(layer, name)
        if member is None:
            continue
        by_member[member] = name
        try:
            choice = _choose(layer, name)
        except Exception as error:  # noqa: BLE001 - vLLM's reasons, and what its own probing of packages raises
            unavailable[name] = _in_short(error)
        else:
            if name != STOCK_BACKENDS[layer.device]:
                usable[name] = choice
    taken, _ = _choose(layer, _AUTO)
    return Backends(by_member.get(taken) or str(taken.name).lower(), usable, unavailable)


def experts_of(layer: MeasuredLayer, choice: Choice) -> Any:
    """Return the experts of a backend over weights in its own order, which they have as `packed`.

    Raises:
        Exception: what vLLM raises while it converts the weights or makes the experts.
    """
    member, experts_class = choice
    holder = _holder(layer)
    if layer.scales:
        w13, w2, *scales = fp8.convert_to_fp8_moe_kernel_format(
            fp8_backend=member,
            layer=holder,
            w13=holder.w13_weight.data,
            w2=holder.w2_weight.data,
            w13_scale=layer.scales[0].clone(),
            w2_scale=layer.scales[1].clone(),
            w13_input_scale=None,
            w2_input_scale=None,
        )
        config = fp8.make_fp8_moe_quant_config(
            fp8_backend=member,
            w1_scale=scales[0],
            w2_scale=scales[1],
            a1_scale=None,
            a2_scale=None,
            layer=holder,
            **layer.quantisation,
        )
    else:
        w13, w2 = unquantized.convert_to_unquantized_kernel_format(
            member,
            moe_config=layer.moe_config,
            w13_weight=holder.w13_weight.data,
            w2_weight=holder.w2_weight.data,
        )
        config = layer.quant_config
    holder.w13_weight.data, holder.w2_weight.data = w13, w2
    experts = experts_class(moe_config=layer.moe_config, quant_config=config)
    if not layer.scales:
        # vLLM's method of unquantised layers asks for this, that of FP8 ones does not.
        experts.process_weights_after_loading(holder)
    experts.packed = (holder.w13_weight, holder.w2_weight)
    return experts


def _holder(layer: MeasuredLayer) -> Any:
    """Return what stands for vLLM's layer while weights are converted: a copy of them and their sizes."""
    holder: Any = torch.nn.Module()
    for name, weight in (("w13_weight", layer.w13), ("w2_weight", layer.w2)):
        holder.register_parameter(name, torch.nn.Parameter(weight.clone(), requires_grad=False))
    shape = layer.shape
    holder.num_experts = holder.local_num_experts = shape.num_experts
    holder.global_num_experts = shape.num_global_experts
    holder.hidden_size = shape.hidden_size
    holder.intermediate_size_per_partition = shape.intermediate_size
    holder.orig_dtype = layer.dtype
    holder.activation = MoEActivation.SILU
    holder.moe_config = layer.moe_config
    if layer.quantisation["block_shape"] is not None:
        holder.weight_block_size = layer.quantisation["block_shape"]
    return holder


def _member(layer: MeasuredLayer, name: Any) -> Any:
    """Return vLLM's backend of this name for such weights; None where it is for others."""
    to_member: Callable[[Any], Any] = fp8.map_fp8_backend if layer.scales else unquantized.map_unquantized_backend
    try:
        return to_member(name)
    except ValueError:
        return None


def _choose(layer: MeasuredLayer, name: Any) -> Choice:
    config = dataclasses.replace(layer.moe_config, moe_backend=name)
    if not layer.scales:
        return unquantized.select_unquantized_moe_backend(config)
    # vLLM allows its CUTLASS kernels to some methods, all of whose weights have a scale per channel.
    per_channel = layer.quantisation["per_out_ch_quant"]
    return fp8.select_fp8_moe_backend(config, *layer.quant_keys, allow_vllm_cutlass=per_channel)


def _in_short(error: Exception) -> str:
    """Return vLLM's reason without the words that all of them have."""
    text = str(error) if isinstance(error, ValueError) else described(error)
    _, since, reason = text.partition("deployment configuration since ")
    return (reason if since else text).strip().rstrip(".")
