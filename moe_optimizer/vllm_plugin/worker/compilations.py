"""Counts what a worker compiles, before it is ready and after: then a request waits for it, and the log says so.

vLLM's own monitor sees kernels of Triton, CuTe-DSL and TileLang, and torch tells of its graphs. DeepGEMM and FlashInfer
tell nobody, so the folders of their caches are looked at. A kernel that Triton finds in its cache counts apart, before
ready: nothing is compiled for it, and the next one would be found as well.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from moe_optimizer.errors import described
from moe_optimizer.inspection.compiler_caches import UNSEEN, Caches, cache_folders, cached_kernels
from moe_optimizer.log import get_logger
from moe_optimizer.proof.record import WARMING_FILE, WARMING_S, CompilationProof
from moe_optimizer.vllm_plugin.patch import Patch
from moe_optimizer.vllm_plugin.session import PluginSession

_KEPT = 8
"""Compilations after ready that the proof names."""
_LOOK_S = 5.0
"""Chosen: between two looks at the caches of a server that is ready; listing two folders takes less than 1 ms."""
_SHARE = 20
"""Chosen: a look takes at most one of so many seconds, in folders with many files or far away."""

logger = get_logger(__name__)
_watch: CompilationWatch | None = None


class CompilationWatch:
    """The count of this worker, in its proof."""

    def __init__(self, session: PluginSession) -> None:
        self._session = session
        self._marker = session.run_dir / WARMING_FILE
        self._step: Any = None
        self._found: str | None = None
        self._lock = threading.Lock()
        session.proof.compilations = self._proof = CompilationProof()

    def step(self, scheduler_output: Any) -> None:
        """Note the step that runs: what is compiled meanwhile is compiled for it. Called in every step."""
        self._step = scheduler_output

    @property
    def warming(self) -> bool:
        """Whether requests are the launcher's: there was a step, and it warms the server up."""
        return self._step is not None and self._marker.exists()

    @property
    def ready(self) -> bool:
        """Whether requests are a user's: there was a step, and the launcher does not warm up any more."""
        return self._step is not None and not self._marker.exists()

    def found(self, kernel: str | None) -> None:
        """Note the kernel that Triton has just found in its cache; None: it has compiled one."""
        self._found = kernel

    def compiled(self, what: str, *, kernel: str = "") -> None:
        """Count one compilation.

        Args:
            what: in words.
            kernel: its name in Triton, which tells of kernels that it has found, too.
        """
        loaded = bool(kernel) and self._found == kernel.rpartition(".")[2]
        with self._lock:
            if self.ready:
                said = f"{what}{', found in the cache' if loaded else ''}{self._shape()}"
                self._proof.after_ready += 1
                self._proof.last = (*self._proof.last, said)[-_KEPT:]
                logger.warning("compiled after the server was ready, so a request waited: %s", said)
            elif loaded:
                self._proof.loaded += 1
            else:
                self._proof.before_ready += 1
                logger.info("compiled before the server is ready: %s%s", what, self._shape())
        if self.warming:
            # The launcher reads it as soon as the request is answered, to know which one it was.
            self._session.writer.write()
        else:
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
    with contextlib.suppress(ImportError):
        _follow_triton(watch)
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


def _follow_triton(watch: CompilationWatch) -> None:
    """Learn of each kernel whether Triton finds it in its cache; right afterwards vLLM's monitor is told of it. A
    Triton that does not say so (before 3.4) is taken to compile.
    """
    from triton import knobs

    before = knobs.compilation.listener

    def listened(*, src: Any, cache_hit: bool, **others: Any) -> None:
        watch.found(str(src.name) if cache_hit else None)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **others)

    knobs.compilation.listener = listened


def _follow_caches(watch: CompilationWatch, folders: Caches) -> None:
    seen = set(cached_kernels(folders))
    pause, took_s = threading.Event(), 0.0
    while not pause.wait(max(_SHARE * took_s, WARMING_S if watch.warming else _LOOK_S)):
        began = time.monotonic()
        now = set(cached_kernels(folders))
        took_s = time.monotonic() - began
        for kernel in sorted(now - seen):
            watch.compiled(kernel)
        seen |= now


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _handle_jit_event(*, backend: str, event: str, fn_name: str, detail: str | None = None) -> None:
        if _watch is not None:
            _watch.compiled(f"{backend} kernel {fn_name}", kernel=fn_name if backend == "Triton" else "")
        original(backend=backend, event=event, fn_name=fn_name, detail=detail)

    return _handle_jit_event


JIT_EVENTS = Patch(
    target="vllm.utils.jit_monitor:_handle_jit_event",
    why="vLLM's monitor of compilations while serving warns once for each kernel and counts nothing",
    remove_when="vLLM has a metric of compilations while serving, with kernel and shape",
    fingerprints={"0.32": "90e420a8cd054550"},
    replacement=_counted,
)
