"""Tunes vLLM's Triton MoE kernel for the shapes of one model on this GPU."""
