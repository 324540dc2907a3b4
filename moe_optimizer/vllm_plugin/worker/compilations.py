"""Counts what a worker compiles, before it is ready and after: then a request waits for it, and the log says so.

vLLM's own monitor sees kernels of Triton, CuTe-DSL and TileLang, and torch tells of its graphs. DeepGEMM and FlashInfer
tell nobody, so the folders of their caches are looked at.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from moe_optimizer.errors import described
from moe_optimizer.inspection.compiler_caches import UNSEEN, Caches, cache_folders, cached_kernels
from moe_optimizer.log import get_logger
from moe_optimizer.proof.record import WARMING_FILE, CompilationProof
from moe_optimizer.vllm_plugin.patch import Patch
from moe_optimizer.vllm_plugin.session import PluginSession

_KEPT = 8
"""Compilations after ready that the proof names."""
_LOOK_S = 5.0
"""Chosen: between two looks at the caches; listing two folders takes less than a millisecond."""

logger = get_logger(__name__)
_watch: CompilationWatch | None = None


class CompilationWatch:
    """The count of this worker, in its proof."""

    def __init__(self, session: PluginSession) -> None:
        self._session = session
        self._marker = session.run_dir / WARMING_FILE
        self._step: Any = None
        self._lock = threading.Lock()
        session.proof.compilations = self._proof = CompilationProof()

    def step(self, scheduler_output: Any) -> None:
        """Note the step that runs: what is compiled meanwhile is compiled for it. Called in every step."""
        self._step = scheduler_output

    @property
    def ready(self) -> bool:
        """Whether requests are a user's: there was a step, and the launcher does not warm up any more."""
        return self._step is not None and not self._marker.exists()

    def compiled(self, what: str) -> None:
        """Count one compilation."""
        with self._lock:
            if not self.ready:
                self._proof.before_ready += 1
            else:
                said = f"{what}{self._shape()}"
                self._proof.after_ready += 1
                self._proof.last = (*self._proof.last, said)[-_KEPT:]
                logger.warning("compiled after the server was ready, so a request waited: %s", said)
        self._session.writer.touch()

    def _shape(self) -> str:
        tokens = getattr(self._step, "total_num_scheduled_tokens", None)
        requests = getattr(self._step, "num_scheduled_tokens", ())
        return "" if tokens is None else f", in a step of {tokens} tokens of {len(requests)} requests"


def watch_compilations(session: PluginSession) -> None:
    """Count from now on what this worker compiles. A failure leaves the count out, not the worker."""
    global _watch  # noqa: PLW0603 - one per process
    if _watch is not None and _watch._session is session:
        return
    _watch = watch = CompilationWatch(session)
    try:
        _follow_torch(watch)
    except Exception as error:  # noqa: BLE001 - torch's interface is its own; vLLM is starting
        logger.warning("graphs of torch.compile are not counted: %s", described(error))
    folders = {name: each for name, each in cache_folders(os.environ).items() if name in UNSEEN}
    threading.Thread(target=_follow_caches, args=(watch, folders), name="moe-optimizer-caches", daemon=True).start()


def note_step(scheduler_output: Any) -> None:
    """Tell the watch of this process, if there is one, which step runs."""
    if _watch is not None:
        _watch.step(scheduler_output)


def _follow_torch(watch: CompilationWatch) -> None:
    from torch._dynamo.callback import callback_handler

    def started(*arguments: Any) -> None:
        trigger = getattr(arguments[0] if arguments else None, "callback_trigger", None)
        if trigger is None or trigger.name == "DYNAMO":
            watch.compiled("torch.compile graph")

    callback_handler.register_start_callback(started)


def _follow_caches(watch: CompilationWatch, folders: Caches) -> None:
    seen = set(cached_kernels(folders))
    pause = threading.Event()
    while not pause.wait(_LOOK_S):
        now = set(cached_kernels(folders))
        for kernel in sorted(now - seen):
            watch.compiled(kernel)
        seen |= now


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _handle_jit_event(*, backend: str, event: str, fn_name: str, detail: str | None = None) -> None:
        if _watch is not None:
            _watch.compiled(f"{backend} kernel {fn_name}")
        original(backend=backend, event=event, fn_name=fn_name, detail=detail)

    return _handle_jit_event


JIT_EVENTS = Patch(
    target="vllm.utils.jit_monitor:_handle_jit_event",
    why="vLLM's monitor of compilations while serving warns once for each kernel and counts nothing",
    remove_when="vLLM has a metric of compilations while serving, with kernel and shape",
    fingerprints={"0.32": "90e420a8cd054550"},
    replacement=_counted,
)
