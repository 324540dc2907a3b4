"""Decides on optimizations: each pass states what it would do and why. Nothing here applies a decision."""
