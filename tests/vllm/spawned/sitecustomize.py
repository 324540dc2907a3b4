"""Read by every Python of a server of the tests that starts Python for its engine and workers, as vLLM does by default.

Its folder is not that of forks, so what both read is found by its path.
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[1] / "forked" / "cheaper.py"))["spare"]()
