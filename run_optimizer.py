"""Serve a Mixture-of-Experts model with the optimizations that fit: `moe-optimizer serve`, from a checkout."""

from __future__ import annotations

import sys

from moe_optimizer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(program="run_optimizer.py", command="serve"))
