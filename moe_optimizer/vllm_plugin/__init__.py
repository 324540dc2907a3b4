"""Runs inside vLLM's processes: carries out a Plan and writes the Proof. It decides nothing.

Importing this package imports no vLLM; the modules that need it import it when they are used.
"""
