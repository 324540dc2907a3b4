"""`python -m moe_optimizer.engine.server --model FOLDER`."""

from __future__ import annotations

import sys

from moe_optimizer.engine.server.serve import main
from moe_optimizer.errors import MoeOptimizerError

if __name__ == "__main__":
    try:
        main()
    except MoeOptimizerError as error:
        print(f"error: {error}" + (f"\n\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        sys.exit(int(error.exit_code))
