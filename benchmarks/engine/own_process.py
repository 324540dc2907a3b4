"""Runs a function in a process of its own, which gives all its memory back and has a peak of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Generator
from types import GeneratorType
from typing import Any

import psutil

_MOST_S_TO_END = 20.0


def in_own_process(function: Any, *arguments: Any, **named: Any) -> Any:
    """Return what `function` returns in a fresh process.

    Raises:
        RuntimeError: it ended without a result; its own messages are on stderr.
    """
    (found,) = each_of_own_process(function, *arguments, **named)
    return found


def each_of_own_process(function: Any, *arguments: Any, limit_s: float | None = None, **named: Any) -> Generator[Any]:
    """Yield what `function`, a generator, yields in a fresh process, as it comes; of any other what it returns.

    Raises:
        RuntimeError: it ended before its end, or was not there after `limit_s`; its own messages are on stderr.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, arguments, named))
    begun = time.monotonic()
    process.start()
    sender.close()
    try:
        while True:
            left = None if limit_s is None else max(0.0, limit_s - (time.monotonic() - begun))
            if not receiver.poll(left):
                raise RuntimeError(f"{function.__name__}{arguments} was not at its end after {limit_s:.0f} s")
            ended, value = receiver.recv()
            if ended:
                return
            yield value
    except EOFError:
        raise RuntimeError(f"{function.__name__}{arguments} ended without a result") from None
    finally:
        _end(process)


def _end(process: Any) -> None:
    """Kill what is left of a process and of those it started, and wait until their memory is free."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    for each in (*children, process):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.join()
    psutil.wait_procs(children, timeout=_MOST_S_TO_END)


def _send(sender: Any, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    found = function(*arguments, **named)
    for each in found if isinstance(found, GeneratorType) else (found,):
        sender.send((False, each))
    sender.send((True, None))
