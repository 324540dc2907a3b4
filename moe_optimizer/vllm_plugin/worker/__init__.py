"""Watches a vLLM worker: proves what became of the plan's arguments, once the model is loaded and in its first step."""
