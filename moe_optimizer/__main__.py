"""`python -m moe_optimizer`: the same as the `moe-optimizer` command."""

from __future__ import annotations

import sys

from moe_optimizer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
