"""`python -m moe_optimizer.engine.server --model FOLDER`."""

import sys

from moe_optimizer.engine.server.serve import read_command_line, serve
from moe_optimizer.errors import MoeOptimizerError

if __name__ == "__main__":
    try:
        serve(**read_command_line(sys.argv[1:]))
    except MoeOptimizerError as error:
        sys.exit(f"error: {error}" + (f"\n\nhint: {error.hint}" if error.hint else ""))
