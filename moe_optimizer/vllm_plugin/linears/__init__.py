"""Multiplies few tokens with the weights of vLLM's dense layers by our kernel."""

SKINNY_PASS = "skinny_gemm"
"""The pass whose decision has it done."""
