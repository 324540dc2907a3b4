"""Reads the metrics of a running server and computes what it does now."""
