"""Counts in vLLM's workers how many tokens each expert is given."""
