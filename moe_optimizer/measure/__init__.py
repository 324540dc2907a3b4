"""Measures kernels, layers and decode steps, without a server; `moe-optimizer measure` and `tune` run it."""
