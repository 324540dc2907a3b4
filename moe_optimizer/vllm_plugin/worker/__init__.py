"""Runs in a vLLM worker: proves what became of the plan's flags, and tells that a model is loaded or a step begins."""
