"""Starts the vLLM servers of a plan, watches them, shows what they prove, and stops them."""
