"""Spares a server's processes what takes processor time and what no test asks for."""

import gc
import os
import sys
import time

COMPILES = "MOE_TEST_COMPILES"
"""In the environment of a server that compiles its model."""


def spare():
    # A quarter of the time that imports take goes into looking for garbage among what lives to the end.
    gc.set_threshold(200_000, 100, 100)
    # vLLM asks for it some eight times in the life of a server, so that a GPU's memory is free: a second each beside
    # torch's compiler.
    gc.collect = lambda generation=2: 0
    # vLLM's processes look for each other's messages without a pause, for a second after the last: on a core that
    # another server of the tests could compute on.
    os.sched_yield = lambda: time.sleep(0.0005)
    # Numba's compiler takes 6 s for the search of drafts in a prompt, which is as right in plain Python.
    _set("NUMBA_DISABLE_JIT", "numba.core.config", "DISABLE_JIT", 1)
    # A server that does not compile its model compiles some functions around it, and imports torch's compiler for them.
    if COMPILES not in os.environ:
        _set("TORCHDYNAMO_DISABLE", "torch._dynamo.config", "disable", True)


def _set(variable, module, name, value):
    """Set what a module reads from the environment when it is imported, or has read."""
    os.environ[variable] = "1"
    if module in sys.modules:
        setattr(sys.modules[module], name, value)
