"""Computes costs: bytes, time and rates, each number with unit and source. Nothing here decides."""
