"""Has a server fork its engine and workers, where vLLM's CPU platform would start Python and import vLLM for each anew.

Read by every Python of a server that the tests start, whose PYTHONPATH names this folder. vLLM forks by itself
where no platform sets VLLM_WORKER_MULTIPROC_METHOD, as the CPU platform does: there is no switch for it.

What a forked process lacks of a spawned one is asserted of the servers that spawn (tests/vllm/conftest.py: `spawning`).
The parent's threads at that moment wait for something: those of ZMQ, of numpy, the two of the plugin.
"""

import gc
import multiprocessing.context
import os
import time

# A quarter of the time that imports take goes into looking for garbage among what lives to the end.
gc.set_threshold(200_000, 100, 100)
# vLLM's processes look for each other's messages without a pause, for a second after the last: on a core that another
# server of the tests could compute on.
os.sched_yield = lambda: time.sleep(0.0005)

# A quarter of the time that imports take goes into looking for garbage among what lives to the end.
gc.set_threshold(200_000, 100, 100)

_made = vars(multiprocessing.context)["_concrete_contexts"]
_made["spawn"] = _made["fork"]
