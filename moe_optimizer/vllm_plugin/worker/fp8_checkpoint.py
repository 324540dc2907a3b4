"""Checks that a worker holds the weights of an FP8 checkpoint in FP8.

vLLM may read such a checkpoint and compute with something else: on a device without FP8 kernels it emulates them with
BF16 weights. Kernels with an order of bytes of their own (Marlin) keep FP8 in tensors of integers; there the element
type says nothing, and the configuration of the layer's kernel does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moe_optimizer.specs.model import ExpertFormat

_EXPERT_WEIGHT = re.compile(r"^w(13|2)_weight(_packed)?$")
_FP8 = frozenset({"float8_e4m3fn", "float8_e4m3fnuz"})
_FP8_KERNELS = _FP8 | {"mxfp8"}
"""vLLM's names for FP8 weights in a kernel's configuration; mxfp8 has a scale per 32 elements."""
_PACKED = frozenset({"uint8", "int8", "int32"})
_UNQUANTIZED = "UnquantizedFusedMoEMethod"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8InMemory:
    """How one worker holds the weights of an FP8 checkpoint."""

    found: str = ""
    """The weights' element type, for example "float8_e4m3fn" or "FP8 in int32"; "" where they are not shown in FP8."""
    why_not: str = ""
    """What was found instead of FP8, or why it cannot be told; "" when the weights are in FP8."""


@dataclass(frozen=True, slots=True)
class _Weight:
    name: str
    dtype: str
    in_fp8: bool | None
    """None: it cannot be told."""
    detail: str
    method: str
    """vLLM's quantisation method of its layer."""


def fp8_in_memory(model: Any, expert_format: ExpertFormat) -> Fp8InMemory:
    """Return whether a loaded model holds in FP8 what its checkpoint has in FP8.

    Args:
        model: a torch module, whose weights vLLM has processed.
        expert_format: how the checkpoint stores the routed experts. "fp8": all experts must be in FP8. "other": those
            must be that vLLM keeps neither unquantised nor in a format that is not FP8. If none is left, the linears
            are checked.
    """
    experts = list(_expert_weights(model))
    if expert_format == "fp8" and not experts:
        return Fp8InMemory(why_not="cannot be shown: the loaded model has no weights of routed experts that we know")
    if expert_format == "other":
        another_format = [each for each in experts if each.dtype in _PACKED and each.in_fp8 is False]
        experts = [each for each in experts if each.method != _UNQUANTIZED and each not in another_format]
    if experts and expert_format in ("fp8", "other"):
        return _of_experts(experts)
    return _of_linears(model)


def _of_experts(weights: list[_Weight]) -> Fp8InMemory:
    wrong = [each for each in weights if each.in_fp8 is False]
    if wrong:
        first = f"{wrong[0].name} first: {wrong[0].detail}"
        return Fp8InMemory(why_not=f"experts: {len(wrong)} of {len(weights)} weights are not in FP8, {first}")
    untold = next((each for each in weights if each.in_fp8 is None), None)
    if untold is not None:
        return Fp8InMemory(why_not=f"cannot be shown: {untold.name} is {untold.detail}")
    return Fp8InMemory(found=", ".join(dict.fromkeys(each.detail for each in weights)))


def _of_linears(model: Any) -> Fp8InMemory:
    """Check a model without routed experts in FP8: one linear in FP8 is enough, because some always stay wide."""
    matrices = [
        (f"{prefix}.{name}".lstrip("."), _name(value.dtype))
        for prefix, module in model.named_modules()
        for name, value in module.named_parameters(recurse=False)
        if name == "weight" and value.dim() > 1
    ]
    narrow = next((dtype for _, dtype in matrices if dtype in _FP8), None)
    if narrow is not None:
        return Fp8InMemory(found=f"linears {narrow}")
    packed = next((each for each in matrices if each[1] in _PACKED), None)
    if packed is not None:
        return Fp8InMemory(why_not=f"cannot be shown: {packed[0]} is {packed[1]}, which may hold FP8 or something else")
    types = Counter(dtype for _, dtype in matrices)
    what = ", ".join(f"{count} {dtype}" for dtype, count in types.most_common()) or "none"
    return Fp8InMemory(why_not=f"linears: no matrix is in FP8, found {what}")


def _expert_weights(model: Any) -> Iterator[_Weight]:
    for prefix, module in model.named_modules():
        for name, value in module.named_parameters(recurse=False):
            if _EXPERT_WEIGHT.match(name):
                method = getattr(module, "quant_method", None)
                # vLLM may wrap a method in one that only moves tokens between ranks.
                method = getattr(method, "old_quant_method", method)
                yield _weight(f"{prefix}.{name}".lstrip("."), _name(value.dtype), method)


def _weight(name: str, dtype: str, method: Any) -> _Weight:
    kind = "none" if method is None else type(method).__name__
    configured = _name(getattr(getattr(method, "moe_quant_config", None), "weight_quant_dtype", None))
    if dtype not in _PACKED:
        in_fp8, detail = dtype in _FP8, dtype
    elif configured in _FP8_KERNELS:
        in_fp8, detail = True, f"FP8 in {dtype}"
    elif configured:
        in_fp8, detail = False, f"{dtype} for a kernel of {configured} weights"
    else:
        in_fp8, detail = None, f"{dtype}, and its quantisation method ({kind}) does not say what that holds"
    return _Weight(name, dtype, in_fp8, detail, kind)


def _name(dtype: Any) -> str:
    """Return the name of a torch dtype, or of one that only vLLM knows; "" for None."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")
