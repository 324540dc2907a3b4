"""Finds the tuned Triton configuration of vLLM's own MoE kernel for this shape and GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_optimizer.costs.fp8_blocks import block_of_slice, whole_blocks
from moe_optimizer.costs.weights import FP8_BLOCK
from moe_optimizer.errors import InputError
from moe_optimizer.inspection.tuned_configs import (
    FOLDER_VARIABLE,
    SHIPPED,
    read_rows,
    read_tuned_sizes,
    state_path,
)
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Gain, Status, Wish
from moe_optimizer.plan.pass_params import ExpertPlacementParams, FlashDmoeParams, Fp8Params, TunedConfigsParams
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.specs.kernel_speeds import STOCK, kernel_for
from moe_optimizer.specs.quantity import Quantity, Source
from moe_optimizer.specs.triton_shape import TritonShape

_REFINED = "fp8"
"""The checkpoint method whose blocks vLLM makes smaller where a slice of an expert is no whole number of them; those of
the other methods' files it refuses to slice so."""
_FP8_FLAGS = {"fp8": False, "fp8_per_tensor": False, "fp8_per_channel": False, "fp8_per_block": True}
"""Values of --quantization that convert experts -> whether with 128 x 128 blocks."""


class TunedConfigs(OptimizationPass):
    """Use of a tuned configuration for these experts on this GPU, where there is one.

    vLLM looks for a file named by the experts on one GPU, their width there, device, dtype and block of scales;
    without one it takes a default and warns. This pass looks for the same name in the user's folder (what the profile
    names, else VLLM_TUNED_CONFIG_FOLDER or the cache that `moe-optimizer tune` writes to), then in the installed vLLM.
    """

    name = "tuned_configs"
    flag = "tuned-configs"
    title = "use a tuned Triton MoE configuration"
    limits = "it applies where vLLM picks its Triton kernel, which another MoE backend may replace"

    def supported(self, ctx: PlanContext) -> tuple[bool, str]:
        """Needs experts, a GPU, a dtype whose file name is known, and a vLLM to look into."""
        if not ctx.model.is_moe:
            return False, "the model has no experts"
        if ctx.device == "cpu":
            return False, "Triton configurations are for GPUs"
        if _scheme(ctx) is None:
            given = ctx.pinned.value("--quantization")
            found = f"--quantization {given}" if given else f"{ctx.model.quant_method}, {ctx.model.weight_bits:g} bits"
            return False, f"needs experts in BF16, FP16, FP32, or FP8 with FP32 scales, found {found}"
        if ctx.software.vllm is None:
            return False, "no vLLM is installed to look into"
        if not (Path(ctx.software.vllm.location) / SHIPPED).is_dir():
            return False, f"vLLM {ctx.software.vllm.version} does not keep its configurations in vllm/{SHIPPED}"
        return True, ""

    def when_off(self, ctx: PlanContext, reason: str) -> Decision:
        """Return that nothing is used; switched off, not what vLLM's own variable names either."""
        return self._none_used(ctx, Status.OFF, "off", reason, keep_out=ctx.wish(self.name)[0] is Wish.OFF)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return which file is used, or which one is missing."""
        shape = _shape(ctx)
        named = ctx.section(self.name).folder
        folder = named or ctx.software.tuned_configs
        config = None if folder is None else Path(folder) / shape.file_name
        # What `moe-optimizer tune` needs to know.
        params = TunedConfigsParams(file=shape.file_name, shape=shape, dtype=ctx.dtype)
        if config is None or not config.exists():
            return self._none_found(ctx, params, keep_out=named is not None)
        try:
            rows = read_rows(config)
        except InputError as error:
            broken = f"tuned_configs: not used, because vLLM would end on it: {error} (in {folder})"
            return self._none_found(ctx, params, keep_out=True, warnings=(broken,))
        gain, warnings = _measured_gain(ctx, config)
        return self.decision(
            ctx,
            Status.ON,
            f"tuned, {len(rows)} rows",
            f"{shape.file_name} is in {folder}",
            Applier.FILES,
            gain=gain,
            env={FOLDER_VARIABLE: str(config.parent.absolute())},
            params=params,
            warnings=warnings,
        )

    def _none_found(
        self, ctx: PlanContext, params: TunedConfigsParams, *, keep_out: bool, warnings: tuple[str, ...] = ()
    ) -> Decision:
        """Return whether vLLM ships the file, where the user's folder has none that can be used."""
        assert ctx.software.vllm is not None, "supported() has checked it"
        version, named, file = ctx.software.vllm.version, ctx.section(self.name).folder, params.file
        fields = {"keep_out": keep_out, "warnings": warnings, "params": params}
        if (Path(ctx.software.vllm.location) / SHIPPED / file).is_file():
            reason = f"vLLM {version} ships a configuration for these experts and this GPU"
            return self._none_used(ctx, Status.OFF, "shipped", reason, evidence=(file,), **fields)
        return self._none_used(
            ctx,
            Status.REFUSED if ctx.wish(self.name)[0] is Wish.ON else Status.OFF,
            "missing",
            f"{file} is {f'neither in {named} nor' if named else 'not'} among the configurations of vLLM "
            f"{version}, which takes a default; `moe-optimizer tune` with the same options on this GPU makes one",
            **fields,
        )

    def _none_used(
        self,
        ctx: PlanContext,
        status: Status,
        value: str,
        reason: str,
        *,
        keep_out: bool,
        warnings: tuple[str, ...] = (),
        **fields: Any,
    ) -> Decision:
        """Return the decision without a file of the user's; `keep_out`: vLLM may not read its variable's folder."""
        if not (keep_out and ctx.software.tuned_configs_by_variable):
            return self.decision(ctx, status, value, reason, Applier.NONE, warnings=warnings, **fields)
        warnings += (f"tuned_configs: {FOLDER_VARIABLE} is set, and vLLM does not get it",)
        env = {FOLDER_VARIABLE: ""}
        return self.decision(ctx, status, value, reason, Applier.FLAGS, env=env, warnings=warnings, **fields)


def _measured_gain(ctx: PlanContext, config: Path) -> tuple[Gain | None, tuple[str, ...]]:
    """Return what the tuning of this file measured where it won and vLLM's kernel computes, at the size nearest to a
    decode step's; and what is to be said where that cannot be read.
    """
    try:
        sizes = [size for size in read_tuned_sizes(config) if _left_to_vllm(ctx, size.tokens)]
    except InputError as error:
        return None, (f"tuned_configs: its gain is not known: {error}",)
    if not sizes:
        return None, ()
    near = min(sizes, key=lambda size: abs(math.log(size.tokens / ctx.workload.batch_size)))
    ref = f"moe-optimizer tune, vLLM {near.vllm_version}: {state_path(config).name}"
    ratio = Quantity(near.ratio, "ratio", Source.MEASURED, ref)
    return Gain(metric=f"time of a MoE layer at {near.tokens} tokens", ratio=ratio), ()


def _left_to_vllm(ctx: PlanContext, tokens: int) -> bool:
    """Return whether flash_dmoe has vLLM's own kernel compute so many tokens."""
    kernels = ctx.params(FlashDmoeParams)
    return kernels is None or all(kernel_for(ranges, tokens) == STOCK for ranges in kernels.dispatch.values())


def _shape(ctx: PlanContext) -> TritonShape:
    """Return what vLLM will look for."""
    model, devices = ctx.model, ctx.parallelism.num_devices
    placement = ctx.params(ExpertPlacementParams)
    experts = model.num_experts + ((placement and placement.num_redundant_experts) or 0)
    slices = 1 if ctx.parallelism.expert_parallel else devices
    width, scheme = model.moe_intermediate_size // slices, _scheme(ctx)
    assert scheme is not None, "supported() has checked it"
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
class _Scheme:
    """What the experts are computed in."""

    dtype: str
    """As the file name has it."""
    block: tuple[int, int] | None = None
    """Of weights that share a scale, in the checkpoint or as converted."""
    converted: bool = False
    """Whether vLLM converts the weights while it loads them."""


def _scheme(ctx: PlanContext) -> _Scheme | None:
    """Return what the experts are computed in; None where no file name is known for it.

    Experts in INT8, INT4 and formats of fewer bits have none: most of vLLM's kernels for them read no such file, and
    those that do were never measured by `moe-optimizer tune`.
    """
    given, model = ctx.pinned.value("--quantization"), ctx.model
    as_loaded = _Scheme(dtype="float32" if ctx.dtype == "float32" else "")
    if model.quant_method is not None:
        stored = {"dtype": as_loaded, "fp8": _Scheme(dtype="fp8_w8a8", block=model.weight_block)}
        return stored.get(model.expert_format)
    if given is not None:
        return _converted(in_blocks=_FP8_FLAGS[given]) if given in _FP8_FLAGS else None
    fp8 = ctx.params(Fp8Params)
    if fp8 is not None and fp8.expert_bits == 8:
        return _converted(in_blocks=fp8.granularity == "block")
    return as_loaded


def _converted(*, in_blocks: bool) -> _Scheme:
    return _Scheme(dtype="fp8_w8a8", block=(FP8_BLOCK, FP8_BLOCK) if in_blocks else None, converted=True)
