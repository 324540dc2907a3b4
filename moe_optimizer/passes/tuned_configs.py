"""Finds the tuned Triton configuration of vLLM's own MoE kernel for this shape and GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.tuned_configs import FOLDER_VARIABLE, SHIPPED, read_rows, state_path
from moe_optimizer.inspection.tuning_state import read_tuning
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Gain, Status, Wish
from moe_optimizer.plan.pass_params import FlashDmoeParams, TunedConfigsParams
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.expert_kernel import converted_format
from moe_optimizer.plan_context.triton_config import triton_scheme, triton_shape, user_config
from moe_optimizer.specs.quantity import Quantity, Source


def _absent(file: Path) -> bool:
    """Whether there is no such file; one that may not be looked at is there, and reading it says why it is not used."""
    try:
        file.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


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
    no_gain = "no record of `moe-optimizer tune` lies beside the file"
    needs_experts = True

    def why_not(self, ctx: PlanContext) -> str:
        """Needs experts, a GPU, a dtype whose file name is known, and a vLLM to look into."""
        if ctx.device == "cpu":
            return "Triton configurations are for GPUs"
        converted = converted_format(ctx)
        if converted:
            return f"the experts are converted to {converted}, which Triton's kernel does not read"
        if triton_scheme(ctx) is None:
            given = ctx.pinned.value("--quantization")
            found = f"--quantization {given}" if given else f"{ctx.model.quant_method}, {ctx.model.weight_bits:g} bits"
            return f"needs experts in BF16, FP16, FP32, or FP8 with FP32 scales, found {found}"
        if ctx.software.vllm is None:
            return "no vLLM is installed to look into"
        if not (Path(ctx.software.vllm.location) / SHIPPED).is_dir():
            return f"vLLM {ctx.software.vllm.version} does not keep its configurations in vllm/{SHIPPED}"
        return ""

    def when_off(self, ctx: PlanContext, reason: str) -> Decision:
        """Return that nothing is used; switched off, not what vLLM's own variable names either."""
        return self._none_used(ctx, Status.OFF, "off", reason, keep_out=ctx.wish(self.name)[0] is Wish.OFF)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return which file is used, or which one is missing."""
        shape = triton_shape(ctx)
        named = ctx.section(self.name).folder
        config = user_config(ctx)
        # What `moe-optimizer tune` needs to know.
        params = TunedConfigsParams(file=shape.file_name, shape=shape, dtype=ctx.dtype)
        if config is None or _absent(config):
            return self._none_found(ctx, params, keep_out=named is not None)
        try:
            rows = read_rows(config)
        except InputError as error:
            broken = f"tuned_configs: not used, because vLLM would end on it: {error} (in {config.parent})"
            return self._none_found(ctx, params, keep_out=True, warnings=(broken,))
        gain, warnings = _measured_gain(ctx, config)
        return self.decision(
            ctx,
            Status.ON,
            f"tuned, {len(rows)} rows",
            f"{shape.file_name} is in {config.parent}",
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
        assert ctx.software.vllm is not None, "why_not() has checked it"
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
        tuning = read_tuning(config)
    except InputError as error:
        return None, (f"tuned_configs: its gain is not known: {error}",)
    verdicts = () if tuning is None else tuning.verdicts.values()
    wins = [each for each in verdicts if each.won and _left_to_vllm(ctx, each.tokens)]
    if tuning is None or not wins:
        return None, ()
    near = min(wins, key=lambda win: (abs(math.log(win.tokens / ctx.workload.batch_size)), win.tokens))
    ref = f"moe-optimizer tune, vLLM {tuning.identity.get('vllm', 'unknown')}: {state_path(config).name}"
    ratio = Quantity(near.ratio, "ratio", Source.MEASURED, ref)
    return Gain(metric=f"time of a MoE layer at {near.tokens} tokens", ratio=ratio), ()


def _left_to_vllm(ctx: PlanContext, tokens: int) -> bool:
    """Return whether flash_dmoe has vLLM's own kernel compute so many tokens."""
    kernels = ctx.params(FlashDmoeParams)
    return kernels is None or kernels.leaves_to_vllm(tokens)
