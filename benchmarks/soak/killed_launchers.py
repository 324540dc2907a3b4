"""SIGKILL of the launcher at moments of a start and afterwards: no process of its server is left 15 s later.

    python benchmarks/soak/killed_launchers.py [--write]

Each moment is one start of the bundled model with vLLM's own processes, nothing of it replaced. A moment is a line of
the server's log, or of what the launcher says, and what is looked for are the processes of the server's session and
those that were below the launcher when it was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_name, cpu_slug, head, host, parser_of, write_record  # noqa: E402
from benchmarks.soak.served import MODEL, launched  # noqa: E402
from moe_optimizer.server_processes import members_of  # noqa: E402
from tests.free_ports import free_port  # noqa: E402

_LIMIT_S = 15.0
_START_TIMEOUT_S = 900.0
_POLL_S = 0.1


def _logs(text: str) -> Callable[[Path], bool]:
    return lambda folder: text in _read(folder / "run" / "server.log")


def _says(text: str) -> Callable[[Path], bool]:
    return lambda folder: text in _read(folder / "stderr")


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "the API server imports vLLM": lambda folder: (folder / "run" / "server.log").exists(),
    "the engine core starts": _logs("Resolved architecture"),
    "the worker starts": _logs("Initializing a V1 LLM engine"),
    "weights are loaded": _logs("Starting to load model"),
    "the model is compiled": _logs("Loading weights took"),
    "the server is warmed up": _says("warming up: round 1"),
    "ready": _says("compiled after ready"),
    "a request is answered": _says("compiled after ready"),
}
"""Moment -> whether it has come. In the last one a client waits."""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Start, kill, look; print how each went and with --write store a record.

    Raises:
        AssertionError: a process outlived its launcher by more than 15 s.
    """
    args = parser_of(__doc__, write=True, commit=True).parse_args(arguments)
    load_before, moments = os.getloadavg()[0], []
    for name in MOMENTS:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            moments.append(_killed_at(name, Path(folder)))
        print(moments[-1], flush=True)
    found = {"limit_s": _LIMIT_S, "outlived": [each for each in moments if each["left"]], "moments": moments}
    if args.write:
        what = "SIGKILL of the launcher at moments of a start"
        record = {**head(what, args.commit), "environment": host(load_before), **found}
        write_record(record, cpu_slug(cpu_name()), "soak_killed_launchers")
    assert not found["outlived"], found["outlived"]
    return found


def _killed_at(name: str, folder: Path) -> dict[str, Any]:
    port, begin = free_port(), time.monotonic()
    with (folder / "stderr").open("w") as said:
        launcher = launched(folder / "run", port, said)
    try:
        while not MOMENTS[name](folder):
            assert launcher.poll() is None, _read(folder / "stderr")
            assert time.monotonic() - begin < _START_TIMEOUT_S, name
            time.sleep(_POLL_S)
        if name == "a request is answered":
            threading.Thread(target=_ask, args=(port,), daemon=True).start()
            time.sleep(1.0)
        return {"moment": name, "after_s": round(time.monotonic() - begin, 1), **_outlived(launcher, folder)}
    finally:
        launcher.kill()
        launcher.wait()
        assert launcher.stdout is not None
        launcher.stdout.close()


def _outlived(launcher: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    """Kill the launcher; return how many processes there were, when the last was gone, and which are left."""
    below = psutil.Process(launcher.pid).children(recursive=True)
    session, plan = below[0].pid, str(folder / "run" / "plan.json")
    titles = {process.pid: " ".join(process.cmdline())[-60:] for process in below}
    launcher.kill()
    launcher.wait()
    killed_at = time.monotonic()
    while True:
        # The later ones too: one that was about to be started when the launcher was killed.
        left = {each.pid: each for each in (*below, *members_of(session, plan)) if _lives(each)}
        seconds = time.monotonic() - killed_at
        if not left or seconds > _LIMIT_S:
            break
        time.sleep(_POLL_S)
    for each in left.values():
        with contextlib.suppress(psutil.Error):
            each.kill()
    return {"processes": len(titles), "gone_after_s": round(seconds, 1), "left": [titles.get(pid, "") for pid in left]}


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ask(port: int) -> None:
    body = json.dumps({"model": str(MODEL), "prompt": "def", "max_tokens": 1500, "ignore_eos": True}).encode()
    url, kind = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    with contextlib.suppress(OSError):
        urllib.request.urlopen(urllib.request.Request(url, body, kind), timeout=60).read()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    main()
