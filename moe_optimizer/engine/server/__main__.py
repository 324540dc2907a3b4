"""`python -m moe_optimizer.engine.server --model FOLDER`."""

import sys

from moe_optimizer.engine.server.serve import main

if __name__ == "__main__":
    sys.exit(main())
