"""moe-optimizer: plan, apply and prove Mixture-of-Experts optimizations on stock vLLM.

Importing this package imports nothing else: every entry point pays only for what it uses.
"""

__version__ = "0.1.0"
