"""Whether a worker holds the weights of an FP8 checkpoint in FP8.

vLLM may read such a checkpoint and compute with something else: its emulations give a device without the kernels BF16
weights. Kernels that want their own order of bytes (Marlin) have FP8 in tensors of integers, so that the element type
says nothing there; then what vLLM configured the layer's kernel for does.
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
"""What vLLM's kernels are configured for where weights are FP8; mxfp8: FP8 with a scale per 32."""
_PACKED = frozenset({"uint8", "int8", "int32"})
_UNQUANTIZED = "UnquantizedFusedMoEMethod"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFp8:
    """What became of an FP8 checkpoint in one worker."""

    found: str = ""
    """The element type that the weights have: "float8_e4m3fn", "FP8 in int32"; "" where `why_not` says more."""
    why_not: str = ""
    """What was found in place of FP8, or why that cannot be told; "" when the weights are in FP8."""


@dataclass(frozen=True, slots=True)
class _Weight:
    name: str
    dtype: str
    in_fp8: bool | None
    """None: it cannot be told."""
    detail: str
    method: str
    """vLLM's quantisation method of its layer."""


def stored_fp8(model: Any, expert_format: ExpertFormat) -> StoredFp8:
    """Return whether a loaded model holds in FP8 what its checkpoint has in FP8.

    Args:
        model: as a worker has it once vLLM has processed the weights; a torch module.
        expert_format: how the checkpoint stores the routed experts. fp8: all of them must be in FP8. other: those that
            vLLM has neither unquantised nor in another format than FP8. Where that leaves none, the linears show it.
    """
    experts = list(_expert_weights(model))
    if expert_format == "fp8" and not experts:
        return StoredFp8(why_not="cannot be shown: the loaded model has no weights of routed experts that we know")
    if expert_format == "other":
        experts = [each for each in experts if each.method != _UNQUANTIZED and not _is_of_another_format(each)]
    if experts and expert_format in ("fp8", "other"):
        return _of_experts(experts)
    return _of_linears(model)


def _of_experts(weights: list[_Weight]) -> StoredFp8:
    wrong = [each for each in weights if each.in_fp8 is False]
    if wrong:
        first = f"{wrong[0].name} first: {wrong[0].detail}"
        return StoredFp8(why_not=f"experts: {len(wrong)} of {len(weights)} weights are not in FP8, {first}")
    untold = next((each for each in weights if each.in_fp8 is None), None)
    if untold is not None:
        return StoredFp8(why_not=f"cannot be shown: {untold.name} is {untold.detail}")
    return StoredFp8(found=", ".join(dict.fromkeys(each.detail for each in weights)))


def _of_linears(model: Any) -> StoredFp8:
    """Return it of a model without routed experts in FP8: one matrix in FP8 shows it, as some always stay."""
    matrices = [
        (f"{prefix}.{name}".lstrip("."), _name(value.dtype))
        for prefix, module in model.named_modules()
        for name, value in module.named_parameters(recurse=False)
        if name == "weight" and value.dim() > 1
    ]
    narrow = next((dtype for _, dtype in matrices if dtype in _FP8), None)
    if narrow is not None:
        return StoredFp8(found=f"linears {narrow}")
    packed = next((each for each in matrices if each[1] in _PACKED), None)
    if packed is not None:
        return StoredFp8(why_not=f"cannot be shown: {packed[0]} is {packed[1]}, which may hold FP8 or something else")
    types = Counter(dtype for _, dtype in matrices)
    what = ", ".join(f"{count} {dtype}" for dtype, count in types.most_common()) or "none"
    return StoredFp8(why_not=f"linears: no matrix is in FP8, found {what}")


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
    if dtype in _FP8:
        return _Weight(name, dtype, True, dtype, kind)
    if dtype not in _PACKED:
        return _Weight(name, dtype, False, dtype, kind)
    configured = _name(getattr(getattr(method, "moe_quant_config", None), "weight_quant_dtype", None))
    if configured in _FP8_KERNELS:
        return _Weight(name, dtype, True, f"FP8 in {dtype}", kind)
    if configured:
        return _Weight(name, dtype, False, f"{dtype} for a kernel of {configured} weights", kind)
    return _Weight(
        name, dtype, None, f"{dtype}, and its quantisation method ({kind}) does not say what that holds", kind
    )


def _is_of_another_format(weight: _Weight) -> bool:
    return weight.dtype in _PACKED and weight.in_fp8 is False


def _name(dtype: Any) -> str:
    """Return a torch dtype, or vLLM's word for one that torch has not, as a word; "" for None."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")
