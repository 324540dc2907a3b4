"""Predicts how fast a model is served in each layout over the GPUs at hand, and ranks the layouts."""
