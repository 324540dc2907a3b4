"""Reads facts: models, machines, installed software and measurements. Nothing here imports torch or vLLM."""
