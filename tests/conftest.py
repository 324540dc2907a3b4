"""What holds for every test: set before anything loads OpenMP, and inherited by every process that a test starts."""

from __future__ import annotations

import os

# Test workers, servers and whatever else runs share the cores. OpenMP threads that spin while they wait for each other
# would wait for cores that the others' spinning threads hold: a second of small kernels then takes most of a minute.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
