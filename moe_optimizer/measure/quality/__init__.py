"""Compares what a plan's server says with what stock vLLM says, and judges the difference."""
