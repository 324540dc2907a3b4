"""Measures the expert kernels of a layer, ours and vLLM's, for a range of numbers of tokens."""
