"""The command line: `moe-optimizer` and `run_optimizer.py`. One file per command."""
