"""Tells what our expert kernel can compute and where it is built."""

from __future__ import annotations

from moe_optimizer.plan.decision import Decision, Status, Wish
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.cuda_kernel import why_no_cuda_kernel
from moe_optimizer.specs.expert_formats import INT4, INT4_GROUPS, MXFP4, int4_weights
from moe_optimizer.specs.lora_targets import reach_experts
from moe_optimizer.specs.model import ModelSpec

OP = "fused_experts"
INT4_OP = "int4_experts"
"""That of INT4 weights on the CPU."""
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
NOT_DATA_PARALLEL = "does not run under data parallelism"
"""What the plugin's experts class says of itself on the CPU build."""
_CUDA_DTYPES = ("bfloat16",)
_PINNED_ON_GPUS = {
    "--moe-backend": ("auto", "triton"),
    "--all2all-backend": ("allgather_reducescatter",),
}
"""Arguments of vLLM with which another of its kernels than Triton computes the experts -> values that keep it."""
_PINNED_AS_STORED: dict[str, tuple[str, ...]] = {"--moe-backend": ("auto",), "--quantization-config": ()}
_PINNED_AS_INT4: dict[str, tuple[str, ...]] = _PINNED_AS_STORED | {"--quantization": ()}
_ACTIVATIONS = ("silu", "swiglu")
_MAX_EXPERTS = 1024
_GPT_OSS = "gpt_oss"
_HIDDEN_MULTIPLE = {"gptq": 128, "awq": 128}
"""Method -> what the hidden size must be a multiple of, or vLLM loads the experts with another method (moe_wna16)."""
_INT4_DTYPES = ("bfloat16", "float16")
_MAX_TOP_K = 32


def why_model_does_not_fit(ctx: PlanContext) -> str:
    """Return why the kernel cannot compute this model's experts, or ""."""
    model = ctx.model
    if not model.is_moe:
        return "the model has no experts"
    fp8 = ctx.device == "cuda" and model.expert_format == "fp8" and bool(model.fp8_scales)
    gpt_oss = has_gpt_oss_experts(model)
    if model.quant_method is not None and not fp8 and not stored_four_bits(model):
        readable = "unquantised experts" + (", FP8 ones with FP32 scales" if ctx.device == "cuda" else "")
        readable += ", INT4 ones of GPTQ, AWQ or compressed-tensors"
        found = f"{model.quant_method}, {model.weight_bits:g} bits"
        return f"needs {readable} or gpt-oss's in MXFP4, found {found}, which vLLM serves as they are"
    if why := _why_not_int4(ctx):
        return why
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


def stored_four_bits(model: ModelSpec) -> str:
    """Return how experts are in four bits that our kernels read as they are: "mxfp4" of gpt-oss, or "int4"; else ""."""
    if model.expert_format == INT4:
        return INT4
    return MXFP4 if has_gpt_oss_experts(model) else ""


def stored_table(model: ModelSpec) -> str:
    """Return how the tables of kernel speeds call the experts of `stored_four_bits`."""
    scheme = model.int4
    return MXFP4 if scheme is None else int4_weights(scheme.group, zero_points=scheme.zero_points)


def _why_not_int4(ctx: PlanContext) -> str:
    """Return why our kernels cannot read the experts of an INT4 checkpoint, or "" where they can or there are none."""
    model, scheme = ctx.model, ctx.model.int4
    if scheme is None:
        return ""
    if scheme.act_order:
        return (
            f"the {model.quant_method} checkpoint has act-order (desc_act, actorder): neighbouring columns have scales "
            "of their own then, for which the kernels have no place"
        )
    groups = ", ".join(map(str, INT4_GROUPS))
    if scheme.group not in INT4_GROUPS:
        found = "of whole rows" if scheme.group < 0 else str(scheme.group)
        return f"needs INT4 in groups of {groups}, found {found}"
    if model.quant_method == "gptq" and scheme.zero_points:
        return "needs symmetric GPTQ: vLLM has no method for GPTQ experts with zero points"
    multiple = _HIDDEN_MULTIPLE.get(str(model.quant_method), 1)
    if model.expert_hidden_size % multiple:
        return (
            f"needs a hidden size in multiples of {multiple}, found {model.expert_hidden_size}: vLLM loads others with "
            "its method moe_wna16"
        )
    if ctx.dtype not in _INT4_DTYPES:
        return f"needs bfloat16 or float16 beside INT4, found {ctx.dtype}"
    return ""


def why_groups_are_cut(ctx: PlanContext) -> str:
    """Return why a device's part of the experts of an INT4 checkpoint is no whole number of groups, or ""."""
    model, scheme, split = ctx.model, ctx.model.int4, ctx.parallelism
    if scheme is None:
        return ""
    width = model.moe_intermediate_size // (1 if split.expert_parallel else split.num_devices)
    if model.expert_hidden_size % scheme.group == width % scheme.group == 0:
        return ""
    return (
        f"needs a hidden size and an expert width in multiples of {scheme.group}, which share a scale, "
        f"found {model.expert_hidden_size} and {width}"
    )


def ours_are_decided(ctx: PlanContext) -> bool:
    """Return whether a kernel of ours computes experts by the decision of flash_dmoe, which is also on where it takes
    another backend of vLLM's.
    """
    decision = ctx.decided["flash_dmoe"]
    params = decision.params
    return decision.status is Status.ON and isinstance(params, FlashDmoeParams) and params.kernel is not None


def why_not_built(ctx: PlanContext) -> str:
    """Return why the kernel is not there for the planned device, or ""."""
    kernels = ctx.software.kernels
    if not kernels.built:
        return f"kernel not built: {kernels.reason}"
    if ctx.device == "cpu":
        needed = INT4_OP if ctx.model.int4 is not None else OP
        return "" if needed in kernels.cpu_ops else f"{needed} has no CPU kernel in this build"
    if reason := why_no_cuda_kernel(ctx, OP):
        return reason
    major, minor = ctx.gpu.compute_capability
    wanted = {f"sm_{major}{minor}", f"sm_{major}{minor}a"}
    if not wanted & set(kernels.cuda_archs):
        return f"kernel not built for sm_{major}{minor}, only for {', '.join(kernels.cuda_archs) or 'no GPU'}"
    return ""


def why_adapters_keep_vllms(ctx: PlanContext) -> str:
    """Return why LoRA adapters leave the experts to vLLM's kernels, which alone apply them, or ""."""
    if not ctx.pinned.is_on("--enable-lora"):
        return ""
    targets = ctx.pinned.value("--lora-target-modules")
    if not reach_experts(None if targets is None else targets.split()):
        return ""
    found = "--enable-lora" if targets is None else f"--lora-target-modules {targets}"
    theirs = "vLLM's own kernels apply them"
    if ctx.device == "cpu":
        theirs = "vLLM's CPU build takes Triton's kernels for that, which do not run there"
    return (
        f"LoRA adapters may change the experts, found {found} after --: {theirs}; with "
        "--lora-target-modules of the attention alone (q_proj k_proj v_proj o_proj) ours compute the experts"
    )


def why_not_beside_triton(ctx: PlanContext) -> str:
    """Return why our kernels cannot take the place of vLLM's Triton on GPUs, whatever the weights are, or ""."""
    if ctx.dtype not in _CUDA_DTYPES:
        return f"needs bfloat16 on GPUs, found {ctx.dtype}"
    if ctx.wish("dual_batch_overlap")[0] is Wish.ON:
        return "dual_batch_overlap needs DeepEP, which hands over tokens as the kernel does not read them"
    own_choice = stored_four_bits(ctx.model)
    needed = "vLLM's own choice of a backend" if own_choice else "vLLM's Triton experts beside it"
    further = {INT4: _PINNED_AS_INT4, MXFP4: _PINNED_AS_STORED}.get(own_choice, {})
    for flag, fitting in (_PINNED_ON_GPUS | further).items():
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
    fits = why_model_does_not_fit(ctx) or why_adapters_keep_vllms(ctx) or why_not_built(ctx)
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
