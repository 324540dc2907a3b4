"""Decides whether our kernel multiplies few tokens with the weights of dense layers."""

from moe_optimizer.passes.skinny_gemm.skinny_gemm import SkinnyGemm as SkinnyGemm
