"""Attention over the paged KV cache: what every backend is given, and one file for each."""
