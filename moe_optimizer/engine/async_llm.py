"""`AsyncLLM`: the engine in a thread of its own, driven from asyncio."""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from itertools import count
from typing import Any

from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.llm_engine import LLMEngine, Prompt
from moe_optimizer.engine.outputs import RequestOutput
from moe_optimizer.engine.sampling_params import RequestOutputKind, SamplingParams
from moe_optimizer.errors import InputError, MoeOptimizerError, ServerFailedError
from moe_optimizer.log import get_logger

_log = get_logger(__name__)


class QueueFullError(MoeOptimizerError):
    """As many requests wait as may wait; the caller should try again later."""


class OutputStream:
    """The outputs of one request. Those that a slow reader has not taken are merged, so they take no memory."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._output: RequestOutput | Exception | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, from any thread; nobody is left to read it if the event loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._put, output)

    async def next(self) -> RequestOutput:
        """Return what is new, as soon as there is something."""
        await self._ready.wait()
        output, self._output = self._output, None
        self._ready.clear()
        if isinstance(output, Exception):
            raise output
        assert output is not None, "an output stream was woken for nothing"
        return output

    def _put(self, output: RequestOutput | Exception) -> None:
        if isinstance(self._output, RequestOutput) and isinstance(output, RequestOutput):
            self._output.add(output)
        else:
            self._output = output
        self._ready.set()


class AsyncLLM:
    """Takes requests from coroutines while the engine computes."""

    def __init__(self, args: EngineArgs, *, engine: LLMEngine | None = None) -> None:
        self.engine = engine or LLMEngine(args)
        self._max_requests = args.max_waiting_requests + args.max_num_seqs
        self._streams: dict[str, OutputStream] = {}
        self._commands: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._ids = count()
        self._failure: ServerFailedError | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the outputs of a request as they come. Leaving the loop early aborts it."""
        stream = self.add_request(prompt, params, request_id, priority=priority)
        finished = False
        try:
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.abort(stream.request_id)

    async def get_output(self, prompt: Prompt, params: SamplingParams, **options: Any) -> RequestOutput:
        """Return the output of a request once it has finished."""
        final = params.model_copy(update={"output_kind": RequestOutputKind.FINAL_ONLY})
        return [output async for output in self.generate(prompt, final, **options)][-1]

    def add_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, *, priority: int = 0
    ) -> OutputStream:
        """Hand a request to the engine, and return its outputs; called in an event loop.

        Raises:
            InputError: as `LLMEngine.add_request`.
            QueueFullError: too many wait.
            ServerFailedError: the engine has stopped.
        """
        if len(self._streams) >= self._max_requests:
            raise QueueFullError(
                f"got {len(self._streams)} requests under way, expected fewer than {self._max_requests}",
                hint="try again later, or raise max_waiting_requests",
            )
        request_id = request_id or f"request-{next(self._ids)}"
        if request_id in self._streams:
            raise InputError(f"request_id: got {request_id!r}, which is in use, expected a new one")
        group = self.engine.make_group(request_id, prompt, params, priority)
        stream = self._streams[request_id] = OutputStream(request_id)
        self._commands.put(lambda: self.engine.add_group(group))
        # Behind the two lines above: an engine that stops either finds the stream, or is found stopped here.
        self.check_health()
        return stream

    def abort(self, request_id: str) -> None:
        """End a request and free what it holds; its stream gets its last output. Unknown ones are ignored."""
        self._commands.put(lambda: self._deliver(self.engine.abort_request(request_id)))

    def check_health(self) -> None:
        if self._failure is not None:
            raise self._failure

    def shutdown(self) -> None:
        """Stop the thread. Requests under way get a ServerFailedError."""
        self._commands.put(None)
        self._thread.join()
        self.engine.shutdown()

    def _run(self) -> None:
        failure = "it was shut down"
        try:
            while self._obey():
                for output in self.engine.step():
                    self._deliver(output)
        except Exception as error:  # noqa: BLE001  (whatever it is, every request is told)
            _log.error("the engine has stopped", exc_info=True)
            failure = _guidance(error)
        self._failure = ServerFailedError(f"the engine has stopped: {failure}")
        for stream in list(self._streams.values()):
            stream.put(self._failure)

    def _obey(self) -> bool:
        """Carry out what was asked for, and wait while there is nothing to compute; return False to stop."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_unfinished_requests())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _deliver(self, output: RequestOutput | None) -> None:
        if output is not None:
            stream = self._streams.pop(output.request_id) if output.finished else self._streams[output.request_id]
            stream.put(output)


def _guidance(error: Exception) -> str:
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        return f"out of memory: lower max_num_seqs, max_num_batched_tokens or gpu_memory_utilization ({error})"
    return f"{type(error).__name__}: {error}"
