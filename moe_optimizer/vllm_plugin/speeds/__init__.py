"""Measures our expert kernels beside vLLM's own, before a server starts."""
