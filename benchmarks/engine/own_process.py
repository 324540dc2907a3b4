"""Runs a function in a process of its own, which gives all its memory back and has a peak of its own."""

from __future__ import annotations

import multiprocessing
from typing import Any

import psutil


def in_own_process(function: Any, *arguments: Any, limit_s: float | None = None, **named: Any) -> Any:
    """Return what `function` returns in a fresh process.

    Raises:
        RuntimeError: it ended without a result, or had none after `limit_s`; its own messages are on stderr.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, arguments, named))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                each.kill()
            raise RuntimeError(f"{function.__name__}{arguments} had no result after {limit_s} s")
        return receiver.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__}{arguments} ended without a result") from None
    finally:
        process.join()


def _send(sender: Any, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    sender.send(function(*arguments, **named))
