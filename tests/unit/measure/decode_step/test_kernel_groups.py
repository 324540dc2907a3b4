"""Kernel names as profilers show them, and their groups."""

from __future__ import annotations

import pytest

from moe_optimizer.measure.decode_step.kernel_groups import GROUPS, group_of


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("fused_moe_kernel", "experts"),
        ("void moeopt::direct_up_kernel<...>(moeopt::DirectProblem)", "experts"),
        ("void vllm::moe::moe_align_block_size_kernel<int>(int*)", "experts"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16, &silu>(...)", "experts"),
        ("void vllm::moe::topkGating<8, 128, 4, 16, 32, int>(float const*)", "gate top-k"),
        ("void flash::FlashAttnFwdCombine<...>", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<...>", "cache write"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>", "RoPE"),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", "norms"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "matrices"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrices"),
        ("void moeopt::skinny_gemm_kernel<(moeopt::SkinnyBuffer)1, 16, 1>(moeopt::SkinnyGemmArgs)", "matrices"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("triton_red_fused_fused_add_rms_norm_moe_forward_0", "norms"),
        ("triton_poi_fused_add_0", "compiled"),
        ("something_new", "other"),
    ],
)
def test_a_kernel_belongs_to_one_group(kernel: str, group: str) -> None:
    assert group_of(kernel) == group
    assert group in GROUPS
