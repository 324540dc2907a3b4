"""Has our kernel compute the attention of decode steps of few requests in vLLM's FlashAttention backend."""

DECODE_PASS = "decode_attention"
"""The pass whose decision has it done."""
