"""Starts, watches and stops the processes of a plan, and reads their proofs. Imports no vLLM."""
