"""Decides whether DeepGEMM may round the scales of FP8 blocks to powers of two.

vLLM lets it do so on Hopper too unless VLLM_USE_DEEP_GEMM_E8M0 says otherwise. The weights are then rounded to FP8 a
second time, under scales up to twice as coarse, and the activations under such scales. Blackwell's matrix units take no
other scales; Hopper's multiply by FP32 ones.
"""

from __future__ import annotations

from moe_optimizer.plan_context.context import PlanContext

VARIABLE = "VLLM_USE_DEEP_GEMM_E8M0"
_HOPPER = 9
WHY = f"DeepGEMM keeps the FP32 scales ({VARIABLE}=0; vLLM would round them to powers of two)"


def exact_scales(ctx: PlanContext, *, blocks: bool) -> dict[str, str]:
    """Return the variables with which DeepGEMM keeps the scales; {} where that is not ours to say: they are no blocks,
    the GPU is no Hopper, the checkpoint was made with powers of two, or the user has set the variable.
    """
    if ctx.device != "cuda" or not blocks or ctx.gpu.compute_capability[0] != _HOPPER:
        return {}
    if ctx.model.power_of_two_scales or ctx.software.deep_gemm_e8m0 or ctx.request.inside_vllm:
        return {}
    return {VARIABLE: "0"}
