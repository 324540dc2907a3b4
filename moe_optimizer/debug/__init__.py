"""Compares the embedded engine with transformers, with a server, and with what it generated before."""
