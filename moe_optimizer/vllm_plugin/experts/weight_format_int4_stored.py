"""Defines how a layer of an INT4 checkpoint is held: the integers of GPTQ, AWQ or compressed-tensors, as ours are.

Nothing is rounded: the readers put the same integers in another order, and the scales stay as vLLM loaded them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights
from moe_optimizer.vllm_plugin.experts.weight_format_int4 import Int4Weights
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from moe_optimizer.ops.int4 import Int4Weight

    Reader = Callable[[Any, Any], tuple[Int4Weight, Int4Weight]]
    """(vLLM's method, its loaded layer) -> w13 and w2."""

FORMAT = "int4_stored"
HINT = "serve with --disable-flash-dmoe: vLLM then repacks the experts for a kernel of its own, where it has one"
_MATRICES = ("w13", "w2")


class StoredInt4Weights(Int4Weights):
    """Four-bit integers of a checkpoint, a scale of 16 bits per group, a zero point per group or 8 everywhere."""

    name = FORMAT
    passes = (EXPERTS_PASS,)


def gptq_weights(method: Any, layer: Any) -> tuple[Int4Weight, Int4Weight]:
    """Return a loaded layer of GPTQ. vLLM reads the symmetric kind alone, and skips the zero points in its files."""
    from moe_optimizer.ops.int4_readers import from_gptq

    if not method.quant_config.is_sym:
        raise RequiredNotAppliedError(f"{EXPERTS_PASS}: GPTQ with zero points is not read by vLLM's method", hint=HINT)
    return _both(from_gptq(_of(layer, each, "qweight"), _of(layer, each, "scales")) for each in _MATRICES)


def awq_weights(method: Any, layer: Any) -> tuple[Int4Weight, Int4Weight]:
    """Return a loaded layer of AWQ."""
    from moe_optimizer.ops.int4_readers import from_awq

    zeros = method.quant_config.zero_point
    return _both(
        _with_zeros(
            from_awq(
                _of(layer, each, "qweight"), _of(layer, each, "scales"), _of(layer, each, "qzeros") if zeros else None
            ),
            wanted=zeros,
        )
        for each in _MATRICES
    )


def compressed_tensors_weights(method: Any, layer: Any) -> tuple[Int4Weight, Int4Weight]:
    """Return a loaded layer of compressed-tensors: vLLM holds it as the file does from 0.31 on, transposed before."""
    from moe_optimizer.ops.int4_readers import CODES_PER_WORD, from_compressed_tensors, from_gptq

    hidden, width = method.moe.hidden_dim, method.moe.intermediate_size_per_partition
    shapes = {"w13": (2 * width, hidden // CODES_PER_WORD), "w2": (hidden, width // CODES_PER_WORD)}
    # A square w13 is told by w2.
    as_in_the_file = all(tuple(_of(layer, each, "weight_packed").shape[1:]) == shapes[each] for each in _MATRICES)
    zeros = not method.symmetric

    def read(each: str) -> Int4Weight:
        packed, scale = _of(layer, each, "weight_packed"), _of(layer, each, "weight_scale")
        zero = _of(layer, each, "weight_zero_point") if zeros else None
        if as_in_the_file:
            return from_compressed_tensors(packed, scale, zero)
        return from_gptq(packed, scale, zero, zeros_less_one=False)

    return _both(_with_zeros(read(each), wanted=zeros) for each in _MATRICES)


def hold(method: Any, layer: Any, read: Reader) -> None:
    """Make a loaded layer's weights its parameters as our kernels read them, in place of the loaded ones.

    Raises:
        RequiredNotAppliedError: they are not as the plan was made for, and no other kernel reads them.
    """
    from moe_optimizer.errors import TensorContractError
    from moe_optimizer.vllm_plugin.experts.converted_layer import put_weights

    _refuse_biases(layer)
    try:
        w13, w2 = read(method, layer)
    except TensorContractError as error:
        raise RequiredNotAppliedError(f"{EXPERTS_PASS}: {error}", hint=HINT) from error
    for name in [name for name in layer._parameters if name.startswith(_MATRICES)]:
        delattr(layer, name)
    put_weights(
        layer,
        KernelWeights(
            format=FORMAT,
            w13=w13.codes,
            w2=w2.codes,
            w13_scale=w13.scale,
            w2_scale=w2.scale,
            w13_zero=w13.zero,
            w2_zero=w2.zero,
        ),
    )


def stored_weights(layer: Any) -> KernelWeights:
    """Return the weights of a layer that `hold` has had."""
    return KernelWeights(
        format=FORMAT,
        w13=layer.w13_weight,
        w2=layer.w2_weight,
        w13_scale=layer.w13_weight_scale,
        w2_scale=layer.w2_weight_scale,
        w13_zero=getattr(layer, "w13_weight_zero", None),
        w2_zero=getattr(layer, "w2_weight_zero", None),
    )


def _of(layer: Any, matrix: str, name: str) -> torch.Tensor:
    return getattr(layer, f"{matrix}_{name}").data


def _both(weights: Iterator[Int4Weight]) -> tuple[Int4Weight, Int4Weight]:
    w13, w2 = weights
    return w13, w2


def _with_zeros(weight: Int4Weight, *, wanted: bool) -> Int4Weight:
    """Return it with zero points where the scheme has them, even if all are 8: those of a reload may not be."""
    import torch

    from moe_optimizer.ops.int4 import CODE_DTYPE, SYMMETRIC_ZERO

    if not wanted or weight.zero is not None:
        return weight
    return weight._replace(zero=torch.full_like(weight.scale, SYMMETRIC_ZERO, dtype=CODE_DTYPE))


def _refuse_biases(layer: Any) -> None:
    """Refuse biases that a checkpoint has although the model does not: some of GPTQ do, and vLLM adds them.

    Raises:
        RequiredNotAppliedError: there are some.
    """
    # vLLM 0.26 loads none.
    loaded = sorted(getattr(layer, "_loaded_expert_biases", ()))
    if loaded:
        raise RequiredNotAppliedError(f"{EXPERTS_PASS}: INT4 experts: got {loaded}, expected no biases", hint=HINT)
