"""`AsyncLLM`: the engine in a thread of its own, driven from asyncio."""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from itertools import count
from typing import Any

from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.llm_engine import LLMEngine, Prompt
from moe_optimizer.engine.outputs import RequestOutput
from moe_optimizer.engine.sampling_params import RequestOutputKind, SamplingParams
from moe_optimizer.errors import InputError, MoeOptimizerError, ServerFailedError
from moe_optimizer.log import get_logger

_log = get_logger(__name__)
Indexed = tuple[int, RequestOutput]
"""An output, and the position of its prompt."""
Deliver = Callable[[RequestOutput | Exception], None]
"""Takes what a request is told, in the engine's thread."""


class QueueFullError(MoeOptimizerError):
    """As many requests wait as may wait; the caller should try again later."""


class AsyncLLM:
    """Takes requests from coroutines while the engine computes."""

    def __init__(self, args: EngineArgs, *, engine: LLMEngine | None = None) -> None:
        self.engine = engine or LLMEngine(args)
        self._max_requests = args.max_waiting_requests + args.max_num_seqs
        self._readers: dict[str, Deliver] = {}
        self._commands: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._ids = count()
        self.failure: ServerFailedError | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the outputs of a request as they come. Leaving the loop early aborts it."""
        async with aclosing(self.generate_all([prompt], sampling_params, priority=priority)) as outputs:
            async for _, output in outputs:
                yield output

    async def generate_all(
        self, prompts: list[Any], params: SamplingParams, *, priority: int = 0
    ) -> AsyncGenerator[Indexed]:
        """Yield the outputs of several as they come. A prompt that is refused ends the others too."""
        if len(prompts) > self._max_requests:
            raise InputError(f"prompt: got {len(prompts)} prompts, expected at most {self._max_requests} in a request")
        loop, positions = asyncio.get_running_loop(), dict[str, int]()
        # At most two of each request: `SequenceGroup.unread`.
        outputs: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

        def deliver(output: RequestOutput | Exception) -> None:
            # Nobody is left to read it if the event loop is closed.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(outputs.put_nowait, output)

        try:
            for position, prompt in enumerate(prompts):
                positions[await self.add_request(prompt, params, priority=priority, deliver=deliver)] = position
            while positions:
                output = await outputs.get()
                if isinstance(output, Exception):
                    raise output
                if group := self.engine.groups.get(output.request_id):
                    group.unread = False
                position = positions.pop(output.request_id) if output.finished else positions[output.request_id]
                yield position, output
        finally:
            for request_id in positions:
                self.abort(request_id)

    async def get_output(self, prompt: Prompt, params: SamplingParams, **options: Any) -> RequestOutput:
        """Return the output of a request once it has finished."""
        final = params.model_copy(update={"output_kind": RequestOutputKind.FINAL_ONLY})
        return [output async for output in self.generate(prompt, final, **options)][-1]

    async def add_request(self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, deliver: Deliver) -> str:
        """Hand a request to the engine, its outputs to `deliver`; return its id.

        Raises:
            InputError: as `LLMEngine.add_request`.
            QueueFullError: too many wait.
            ServerFailedError: the engine has stopped.
        """
        request_id = f"request-{next(self._ids)}"
        self._check_room()
        # In a thread: others are not to wait for a long text.
        group = await asyncio.to_thread(self.engine.make_group, request_id, prompt, params, priority)
        self._check_room()  # others may have come meanwhile
        self._readers[request_id] = deliver
        self._commands.put(lambda: self.engine.add_group(group))
        # Behind the two lines above: an engine that stops either finds the reader, or is found stopped here.
        self.check_health()
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request and free what it holds; its reader gets its last output. Unknown ones are ignored."""
        self._commands.put(lambda: self._deliver(self.engine.abort_request(request_id)))

    def check_health(self) -> None:
        if self.failure is not None:
            raise self.failure

    def shutdown(self) -> None:
        """Stop the thread. Requests under way get a ServerFailedError."""
        self._commands.put(None)
        self._thread.join()
        self.engine.shutdown()

    def _check_room(self) -> None:
        if (under_way := len(self._readers)) >= self._max_requests:
            said = f"got {under_way} requests under way, expected fewer than {self._max_requests}"
            raise QueueFullError(said, hint="try again later, or raise max_waiting_requests")

    def _run(self) -> None:
        failure = "it was shut down"
        try:
            while self._obey():
                for output in self.engine.step():
                    self._deliver(output)
        except Exception as error:  # noqa: BLE001  (whatever it is, every request is told)
            _log.error("the engine has stopped", exc_info=True)
            failure = f"{type(error).__name__}: {error}; {getattr(error, 'hint', None) or 'its log is above'}"
        self.failure = ServerFailedError(f"the engine has stopped: {failure}")
        for deliver in list(self._readers.values()):
            deliver(self.failure)

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
            deliver = self._readers.pop(output.request_id) if output.finished else self._readers[output.request_id]
            if not output.finished:
                self.engine.groups[output.request_id].unread = True
            deliver(output)
