"""Measures kernels, layers, decode steps and servers; `moe-optimizer measure`, `bench`, `quality` and `tune` run it."""
