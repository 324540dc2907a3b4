"""Decides whether our kernel computes the attention of decode steps of few requests."""

from moe_optimizer.passes.decode_attention.decode_attention import DecodeAttention as DecodeAttention
