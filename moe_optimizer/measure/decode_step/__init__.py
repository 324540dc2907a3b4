"""Measures where the time of one decode step goes: per group of kernels, beside the bytes that the group must read."""
