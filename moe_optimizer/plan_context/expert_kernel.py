"""Tells what our expert kernel can compute and where it is built."""

from __future__ import annotations

from moe_optimizer.plan.decision import Decision, Status, Wish
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.specs.expert_formats import MXFP4
from moe_optimizer.specs.model import ModelSpec

OP = "fused_experts"
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
NOT_DATA_PARALLEL = "does not run under data parallelism"
"""What the plugin's experts class says of itself on the CPU build."""
_CUDA_DTYPES = ("bfloat16",)
_PINNED_ON_GPUS = {
    "--moe-backend": ("auto", "triton"),
    "--enable-lora": ("false",),
    "--all2all-backend": ("allgather_reducescatter",),
}
"""Arguments of vLLM with which another of its kernels than Triton computes the experts -> values that keep it."""
_PINNED_FOR_GPT_OSS: dict[str, tuple[str, ...]] = {"--moe-backend": ("auto",), "--quantization-config": ()}
_ACTIVATIONS = ("silu", "swiglu")
_MAX_EXPERTS = 1024
_GPT_OSS = "gpt_oss"
_MAX_TOP_K = 32


def why_model_does_not_fit(ctx: PlanContext) -> str:
    """Return why the kernel cannot compute this model's experts, or ""."""
    model = ctx.model
    if not model.is_moe:
        return "the model has no experts"
    fp8 = ctx.device == "cuda" and model.expert_format == "fp8" and bool(model.fp8_scales)
    gpt_oss = has_gpt_oss_experts(model)
    if model.quant_method is not None and not fp8 and not gpt_oss:
        readable = "unquantised experts" + (", FP8 ones with FP32 scales" if ctx.device == "cuda" else "")
        found = f"{model.quant_method}, {model.weight_bits:g} bits"
        return f"needs {readable} or gpt-oss's in MXFP4, found {found}, which vLLM serves as they are"
    if model.expert_matrices != 3:
        return f"needs gated experts (3 matrices), found {model.expert_matrices}"
    if model.expert_activation not in _ACTIVATIONS:
        return f"needs the activation silu, found {model.expert_activation or 'none named'}"
    if model.expert_has_bias and not gpt_oss:
        return "needs experts without biases"
    if model.num_experts > _MAX_EXPERTS or model.top_k > _MAX_TOP_K:
        return (
            f"needs at most {_MAX_EXPERTS} experts and top-{_MAX_TOP_K}, found {model.num_experts}, top-{model.top_k}"
        )
    if ctx.dtype not in DTYPES:
        return f"needs bfloat16, float16 or float32, found {ctx.dtype}"
    return ""


def has_gpt_oss_experts(model: ModelSpec) -> bool:
    """Return whether the experts are in MXFP4 as gpt-oss's checkpoints have them, which our kernels read as they are:
    gate and up rows in turn, biases, the clamped activation. vLLM tells them by the same two fields.
    """
    return model.expert_format == MXFP4 and model.model_type == _GPT_OSS


def why_not_built(ctx: PlanContext) -> str:
    """Return why the kernel is not there for the planned device, or ""."""
    kernels = ctx.software.kernels
    if not kernels.built:
        return f"kernel not built: {kernels.reason}"
    if ctx.device == "cpu":
        return "" if OP in kernels.cpu_ops else f"{OP} has no CPU kernel in this build"
    if OP not in kernels.cuda_ops:
        why = f": {kernels.cuda_why_not}" if kernels.cuda_why_not else ""
        return f"{OP} has no CUDA kernel in this build{why}"
    major, minor = ctx.gpu.compute_capability
    wanted = {f"sm_{major}{minor}", f"sm_{major}{minor}a"}
    if not wanted & set(kernels.cuda_archs):
        return f"kernel not built for sm_{major}{minor}, only for {', '.join(kernels.cuda_archs) or 'no GPU'}"
    return ""


def why_not_beside_triton(ctx: PlanContext) -> str:
    """Return why our kernels cannot take the place of vLLM's Triton on GPUs, whatever the weights are, or ""."""
    if ctx.dtype not in _CUDA_DTYPES:
        return f"needs bfloat16 on GPUs, found {ctx.dtype}"
    if ctx.wish("dual_batch_overlap")[0] is Wish.ON:
        return "dual_batch_overlap needs DeepEP, which hands over tokens as the kernel does not read them"
    own_choice = has_gpt_oss_experts(ctx.model)
    needed = "vLLM's own choice of a backend" if own_choice else "vLLM's Triton experts beside it"
    for flag, fitting in (_PINNED_ON_GPUS | (_PINNED_FOR_GPT_OSS if own_choice else {})).items():
        value = ctx.pinned.value(flag)
        if value not in (None, *fitting):
            return f"needs {needed}, found {f'{flag} {value}'.strip()} after --"
    return ""


def why_not_for_converted_weights(ctx: PlanContext) -> str:
    """Return why experts in a format of ours (FP8 on the CPU, four bits, pruned) cannot be served, or "": no other
    kernel reads them, so flash_dmoe must be on.
    """
    wish, origin = ctx.wish("flash_dmoe")
    if wish is Wish.OFF:
        return f"needs our expert kernel to read the weights, and flash_dmoe is switched off by {origin}"
    fits = why_model_does_not_fit(ctx) or why_not_built(ctx)
    return fits if ctx.device == "cpu" else fits or why_not_beside_triton(ctx)


def converting(ctx: PlanContext) -> Decision | None:
    """Return the decision made before by which the plugin converts the experts; None: they stay as loaded."""
    decided = ctx.decided.values()
    return next((each for each in decided if each.status is Status.ON and each.weight_format is not None), None)


def converted_format(ctx: PlanContext) -> str | None:
    """Return the format that a pass decided before converts the experts to; None: they stay as loaded."""
    decision = converting(ctx)
    return None if decision is None else decision.weight_format


def why_converted_already(ctx: PlanContext) -> str:
    """Return that a pass decided before converts the experts, and who asked for it; "": none does."""
    decision = converting(ctx)
    if decision is None:
        return ""
    return f"the experts are converted to {decision.weight_format} already, by {decision.wish_origin}"
