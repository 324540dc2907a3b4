"""Measures each optimization of the embedded engine: from a naive loop up, one added at a time."""
