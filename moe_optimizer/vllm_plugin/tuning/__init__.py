"""Tunes vLLM's Triton MoE kernel."""
