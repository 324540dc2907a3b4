"""Names the tuned Triton configuration that vLLM looks for, and finds the user's own that a plan gives it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.costs.fp8_blocks import block_of_slice, whole_blocks
from moe_optimizer.costs.weights import FP8_BLOCK
from moe_optimizer.errors import InputError
from moe_optimizer.inspection.tuned_configs import read_rows
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.pass_params import ExpertPlacementParams, Fp8Params
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.specs.triton_shape import TritonShape

_REFINED = "fp8"
"""The checkpoint method whose blocks vLLM makes smaller where a slice of an expert is no whole number of them; those of
the other methods' files it refuses to slice so."""
_FP8_FLAGS = {"fp8": False, "fp8_per_tensor": False, "fp8_per_channel": False, "fp8_per_block": True}
"""Values of --quantization that convert experts -> whether with 128 x 128 blocks."""
_DIGITS = 12


def user_config(ctx: PlanContext) -> Path | None:
    """Return where the user's configuration of these experts would lie; None: no folder is looked into."""
    folder = ctx.section("tuned_configs").folder or ctx.software.tuned_configs
    return None if folder is None else Path(folder) / triton_shape(ctx).file_name


def tuned_digest(ctx: PlanContext) -> str:
    """Return a digest of the user's configuration that this plan has vLLM use; "" where it uses none."""
    if ctx.wish("tuned_configs")[0] is Wish.OFF or ctx.device != "cuda" or triton_scheme(ctx) is None:
        return ""
    config = user_config(ctx)
    if config is None or not config.is_file():
        return ""
    try:
        rows = read_rows(config)
    except InputError:
        return ""  # the tuned_configs pass keeps it from vLLM and says so
    return hashlib.sha256(repr(sorted(rows.items())).encode()).hexdigest()[:_DIGITS]


def triton_shape(ctx: PlanContext) -> TritonShape:
    """Return what vLLM will look for."""
    model, devices = ctx.model, ctx.parallelism.num_devices
    placement = ctx.params(ExpertPlacementParams)
    experts = model.num_experts + ((placement.num_redundant_experts or 0) if placement else 0)
    slices = 1 if ctx.parallelism.expert_parallel else devices
    width, scheme = model.moe_intermediate_size // slices, triton_scheme(ctx)
    assert scheme is not None, "no file name is known for these experts"
    block = scheme.block
    if block is not None and scheme.converted:
        width = whole_blocks(width)
    elif block is not None and model.quant_method == _REFINED:
        block = block_of_slice(block, width, model.expert_hidden_size, slices)
    return TritonShape(
        # Where experts do not divide, the first GPUs have one more.
        num_experts=math.ceil(experts / devices) if ctx.parallelism.expert_parallel else experts,
        width=width,
        device_name=ctx.gpu.name,
        dtype=scheme.dtype,
        block=block,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonScheme:
    """What the experts are computed in."""

    dtype: str
    """As the file name has it."""
    block: tuple[int, int] | None = None
    """Of weights that share a scale, in the checkpoint or as converted."""
    converted: bool = False
    """Whether vLLM converts the weights while it loads them."""


def triton_scheme(ctx: PlanContext) -> TritonScheme | None:
    """Return what the experts are computed in; None where no file name is known for it.

    Experts in INT8, INT4 and formats of fewer bits have none: most of vLLM's kernels for them read no such file, and
    those that do were never measured by `moe-optimizer tune --only triton`.
    """
    given, model = ctx.pinned.value("--quantization"), ctx.model
    as_loaded = TritonScheme(dtype="float32" if ctx.dtype == "float32" else "")
    if model.quant_method is not None:
        stored = {"dtype": as_loaded, "fp8": TritonScheme(dtype="fp8_w8a8", block=model.weight_block)}
        return stored.get(model.expert_format)
    if given is not None:
        return _converted(in_blocks=_FP8_FLAGS[given]) if given in _FP8_FLAGS else None
    fp8 = ctx.params(Fp8Params)
    if fp8 is not None and fp8.expert_bits == 8:
        return _converted(in_blocks=fp8.granularity == "block")
    return as_loaded


def _converted(*, in_blocks: bool) -> TritonScheme:
    return TritonScheme(dtype="fp8_w8a8", block=(FP8_BLOCK, FP8_BLOCK) if in_blocks else None, converted=True)
