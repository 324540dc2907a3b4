"""Plans and serves the bundled model, asks it, shows the proof and stops; then serves it with FP8 weights to compare.

Runs the command that a user would type and talks to it over HTTP only. Exit code 0: the servers became ready, answered
and stopped cleanly; 1: they did not, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from demo_fp8 import Measured, comparison, measure
from server_http import ServerError, answer_of, post_json

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "tiny-moe"
COMMAND = (sys.executable, str(ROOT / "run_optimizer.py"))
HOST = "127.0.0.1"
READY_TIMEOUT_S = 1200.0
"""vLLM's CPU build imports and compiles for about a minute on two cores; a busy machine takes several times that."""
STOP_TIMEOUT_S = 180.0
EXPERT_LOAD_S = 4.0
"""The workers write their counts every 3 seconds."""
PROMPT = "def __init__(self, name):"
CHAT = [{"role": "user", "content": "Write a Python function that reads a file."}]


class DemoError(Exception):
    """A step of the demo failed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(MODEL), help="model folder (default: the bundled one)")
    parser.add_argument("serve_args", nargs="*", help="more arguments of run_optimizer.py, after --")
    options = parser.parse_args(arguments)
    try:
        _demo(options.model, options.serve_args)
    except (DemoError, ServerError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _demo(model: str, more: Sequence[str]) -> None:
    port = _free_port()
    # Strict: the command fails unless everything planned for the workers is seen running in them.
    # Enabled without measuring, so that the demo shows our kernels at work on every processor.
    kernels = ["--enable-flash-dmoe", "--calibrate", "0"]
    serve = [*COMMAND, "--model", model, "--port", str(port), "--strict", *kernels, *more]
    heldout = Path(model) / "heldout.txt"
    _heading("a first answer, from the embedded engine")
    _answer_first(model)
    _heading("the plan")
    if subprocess.run([*serve, "--dry-run"], check=False, timeout=300).returncode != 0:
        raise DemoError("planning failed; the reason is above")
    _heading("the server")
    with _serving(serve) as ready:
        with answer_of(f"{ready['base_url']}/health"):
            pass
        _heading("one completion")
        _show_completion(ready["base_url"], ready["model"])
        _heading("one streamed chat")
        _show_chat(ready["base_url"], ready["model"])
        without_fp8 = measure(ready, heldout)
        _heading("which experts the requests used")
        _show_experts(ready["run_dir"])
        _heading("stopping")
    _heading("the same server with FP8 weights")
    with _serving([*serve, "--enable-fp8"]) as ready:
        _heading("FP8 off against on")
        _show_fp8(without_fp8, ready, heldout)
        _heading("stopping")
    print("\ndemo finished: served, answered, stopped")


def _answer_first(model: str) -> None:
    """Answer without a server, while vLLM would still be importing."""
    started = time.monotonic()
    script = [sys.executable, str(ROOT / "examples" / "offline.py"), "--model", model]
    # On a machine that does other things too, threads that spin while they wait keep those from its cores that work.
    environ = {"OMP_WAIT_POLICY": "passive", **os.environ}
    asked = subprocess.run(
        [*script, "--temperature", "0", "--max-tokens", "32", PROMPT], check=False, timeout=300, env=environ
    )
    if asked.returncode != 0:
        raise DemoError("the embedded engine gave no answer; the reason is above")
    print(f"[{time.monotonic() - started:.1f} s from the command to its end]")


@contextlib.contextmanager
def _serving(command: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run the serve command for the length of the block; yields what it printed when the server was ready."""
    server = subprocess.Popen([*command, "--json"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        yield _wait_until_ready(server)
        code = _stop(server)
    finally:
        _kill(server)
    if code != 0:
        raise DemoError(f"the server command ended with exit code {code}, expected 0")


def _show_fp8(without: Measured, ready: dict[str, Any], heldout: Path) -> None:
    (row,) = [row for row in ready["passes"] if row["pass_name"] == "fp8"]
    if row["applied"] in ("-", "no"):
        print(f"not used here: {row['why_not']}")
        return
    for line in comparison(without, measure(ready, heldout)):
        print(line)


def _heading(text: str) -> None:
    print(f"\n--- {text} ---", flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _wait_until_ready(server: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return the JSON that the command prints once the server is healthy and its proofs are read."""
    assert server.stdout is not None
    deadline, printed = time.monotonic() + READY_TIMEOUT_S, b""
    with selectors.DefaultSelector() as selector:
        selector.register(server.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if not selector.select(timeout=1.0):
                continue
            chunk = os.read(server.stdout.fileno(), 65_536)
            if not chunk:
                code = server.wait(STOP_TIMEOUT_S)
                raise DemoError(f"the server command ended with exit code {code} before it was ready")
            printed += chunk
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(printed)
    raise DemoError(f"the server was not ready after {READY_TIMEOUT_S:g} s")


def _show_completion(base_url: str, model: str) -> None:
    request = {"model": model, "prompt": PROMPT, "max_tokens": 48, "temperature": 0}
    answer = post_json(f"{base_url}/v1/completions", request)
    text, usage = answer["choices"][0]["text"], answer["usage"]
    if not text or usage["completion_tokens"] < 1:
        raise DemoError(f"/v1/completions: an empty answer: {answer}")
    print(PROMPT + text)
    print(f"[{usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} completion tokens]")


def _show_chat(base_url: str, model: str) -> None:
    request = {"model": model, "messages": CHAT, "max_tokens": 48, "temperature": 0, "stream": True}
    print(f"user: {CHAT[0]['content']}\nassistant: ", end="", flush=True)
    chunks, text, ended = 0, "", False
    with answer_of(f"{base_url}/v1/chat/completions", request) as lines:
        for line in lines:
            data = line.strip().removeprefix(b"data: ")
            if not data:
                continue
            if data == b"[DONE]":
                ended = True
                break
            choices = json.loads(data)["choices"]
            piece = choices[0]["delta"].get("content") or "" if choices else ""
            print(piece, end="", flush=True)
            text += piece
            chunks += bool(piece)
    print(f"\n[{chunks} chunks]")
    if not text or chunks < 2 or not ended:
        raise DemoError(f"/v1/chat/completions: {chunks} chunks, stream {'ended' if ended else 'cut off'}: {text!r}")


def _show_experts(run_dir: str) -> None:
    time.sleep(EXPERT_LOAD_S)
    experts = [sys.executable, "-m", "moe_optimizer", "experts", run_dir]
    if subprocess.run(experts, cwd=ROOT, check=False, timeout=300).returncode != 0:
        raise DemoError("the run folder does not show which experts were used; the reason is above")


def _stop(server: subprocess.Popen[bytes]) -> int:
    """Ask the command to stop as Ctrl-C does, and return its exit code."""
    server.send_signal(signal.SIGINT)
    try:
        return server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise DemoError(f"the server command did not stop within {STOP_TIMEOUT_S:g} s") from None


def _kill(server: subprocess.Popen[bytes]) -> None:
    """End the command if it still runs; on SIGTERM it ends its own children."""
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
