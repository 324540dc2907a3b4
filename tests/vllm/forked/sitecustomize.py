"""Has a server fork its engine and workers, where vLLM's CPU platform would start Python and import vLLM for each anew.

Read by every Python of a server that the tests start, whose PYTHONPATH names this folder. vLLM forks by itself
where no platform sets VLLM_WORKER_MULTIPROC_METHOD, as the CPU platform does: there is no switch for it.

What a forked process lacks of a spawned one is asserted of the servers that spawn (tests/vllm/conftest.py: `spawning`).
The parent's threads at that moment wait for something: those of ZMQ, of numpy, the two of the plugin.
"""

import multiprocessing.context
import os

import after_import
import cheaper

cheaper.spare()
# vLLM gives a worker its cores, all but one, by OpenMP's environment. A fork does not read that again: it has as many
# threads as its parent, and on a busy machine each small operation would wait until all of them had a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_made = vars(multiprocessing.context)["_concrete_contexts"]
_made["spawn"] = _made["fork"]


def _look_here(registry):
    # vLLM imports itself in a process of its own, so that looking at a model's class touches no GPU.
    registry._run_in_subprocess = lambda look: look()


after_import.change("vllm.model_executor.models.registry", _look_here)
