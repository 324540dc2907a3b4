"""The Triton configuration of vLLM's own MoE kernel for this shape and GPU."""

from __future__ import annotations

import re
from pathlib import Path

from moe_optimizer.costs.weights import FP8_BLOCK
from moe_optimizer.passes.base import NOT_AVAILABLE, OptimizationPass, PlanContext
from moe_optimizer.plan.decision import Applier, Decision, Status

_SHIPPED = "model_executor/layers/fused_moe/configs"


class TunedConfigs(OptimizationPass):
    """Is there a tuned configuration for these experts on this GPU?

    vLLM looks for a file named by local experts, expert width on one GPU, device and dtype; without one it uses
    a default and warns. This pass looks the same names up in the installed vLLM and in a folder of the user's
    (VLLM_TUNED_CONFIG_FOLDER).
    """

    name = "tuned_configs"
    flag = "tuned-configs"
    title = "find the tuned Triton MoE configuration"
    limits = (
        "it applies where vLLM picks its Triton kernel, which another MoE backend may replace; finding a "
        "configuration is done here, making one is not"
    )

    def supported(self, ctx: PlanContext) -> tuple[bool, str]:
        """Needs experts, a GPU, a dtype whose file name is known, and a vLLM to look into."""
        if not ctx.model.is_moe:
            return False, "the model has no experts"
        if ctx.device == "cpu":
            return False, "Triton configurations are for GPUs"
        if not _dtype_parts(ctx):
            return False, f"the Triton kernel is not used for {ctx.model.quant_method} experts"
        if ctx.software.vllm is None:
            return False, "no vLLM is installed to look into"
        if not (Path(ctx.software.vllm.location) / _SHIPPED).is_dir():
            return False, f"vLLM {ctx.software.vllm.version} does not keep its configurations in vllm/{_SHIPPED}"
        return True, ""

    def choose(self, ctx: PlanContext) -> Decision:
        """Return which file is used, or which one is missing."""
        names = _file_names(ctx)
        folder = ctx.profile.passes.tuned_configs.folder
        own = next((name for name in names if folder is not None and (Path(folder) / name).is_file()), None)
        if folder is not None and own is not None:
            return self.decision(
                ctx,
                Status.ON,
                "from the folder",
                f"{own} is in the folder that {ctx.profile_origin} names",
                Applier.FILES,
                env={"VLLM_TUNED_CONFIG_FOLDER": str(Path(folder).absolute())},
                params={"file": own},
            )
        assert ctx.software.vllm is not None, "supported() has checked it"
        shipped = Path(ctx.software.vllm.location) / _SHIPPED
        found = next((name for name in names if (shipped / name).is_file()), None)
        version = ctx.software.vllm.version
        if found is not None:
            reason = f"vLLM {version} ships a configuration for these experts and this GPU"
            return self.decision(
                ctx, Status.OFF, "shipped", reason, Applier.NONE, evidence=(found,), params={"file": found}
            )
        return self.decision(
            ctx,
            Status.UNAVAILABLE,
            "missing",
            f"{names[0]} is not among the configurations of vLLM {version}, which will use a default; "
            f"tuning one is {NOT_AVAILABLE}",
            Applier.NONE,
            evidence=tuple(f"not found: {name}" for name in names),
            params={"missing": list(names)},
        )


def _file_names(ctx: PlanContext) -> tuple[str, ...]:
    """Return the names vLLM would look for, most likely first."""
    model, devices = ctx.model, ctx.tensor_parallel_size * ctx.data_parallel_size
    experts = model.num_experts // devices if ctx.expert_parallel else model.num_experts
    width = model.moe_intermediate_size if ctx.expert_parallel else model.moe_intermediate_size // devices
    device = re.sub(r"[\s/]+", "_", ctx.gpu.name)
    if "H200" in device.split("_"):
        device = "NVIDIA_H200"
    return tuple(f"E={experts},N={width},device_name={device}{dtype}.json" for dtype in _dtype_parts(ctx))


def _dtype_parts(ctx: PlanContext) -> tuple[str, ...]:
    """Return the dtype part of the file name; two where the model's facts do not tell the granularity."""
    quantisation = ctx.pinned.get("--quantization") or ctx.model.quant_method
    if quantisation is None:
        return ("",)
    if "fp8" in quantisation:
        block = f",dtype=fp8_w8a8,block_shape=[{FP8_BLOCK},{FP8_BLOCK}]"
        return (block, ",dtype=fp8_w8a8")
    return ()
