"""The printed commands of prefill and decode servers on two machines, run as they are printed, on one host.

The machines are two loopback addresses, the router is the real one, and `vllm` is a stand-in that speaks HTTP. That
caches travel between real servers on one machine: tests/vllm/test_disaggregation.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.plan.machine_commands import render_machines
from tests.builders import gpus, made_plan, qwen3_30b_a3b
from tests.eventually import eventually
from tests.free_ports import free_ports

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="needs the package vllm-router")
ADDRESSES = {"ADDRESS_0": "127.0.0.1", "ADDRESS_1": "127.0.0.2"}
STAND_IN = """\
#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

words = sys.argv
given = {{flag: words[words.index(flag) + 1] for flag in ("--host", "--port", "--kv-transfer-config")}}
role = json.loads(given["--kv-transfer-config"])["kv_role"]
own = (os.environ[key] for key in ("CUDA_VISIBLE_DEVICES", "VLLM_NIXL_SIDE_CHANNEL_HOST"))
name = " ".join([role, given["--host"], *own])


class Handler(BaseHTTPRequestHandler):
    def answer(self, body):
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        self.answer({{"data": [{{"id": "model"}}]}})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        with open({asked!r}, "a") as asked:
            asked.write(name + "\\n")
        choice = {{"index": 0, "text": name, "finish_reason": "length"}}
        self.answer({{"choices": [choice], "kv_transfer_params": {{}}}})

    def log_message(self, *words):
        pass


ThreadingHTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""


@contextlib.contextmanager
def started(parts: list[str], search_path: str) -> Iterator[None]:
    """Run each part in a shell of its own, and end everything that it started."""
    environment = {**os.environ, "PATH": search_path}
    shells = [
        subprocess.Popen(["sh", "-c", part], env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
        for part in parts
    ]
    try:
        yield
    finally:
        for shell in shells:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()


def test_the_printed_commands_serve_requests_in_turns_through_the_router(tmp_path: Path) -> None:
    port = free_ports(4)
    plan = made_plan(
        qwen3_30b_a3b(), gpus("h100_sxm", 8), num_nodes=2, num_gpus=16, layout="tp4p1d3", port=port,
    )  # fmt: skip
    asked = tmp_path / "asked"
    (tmp_path / "vllm").write_text(STAND_IN.format(python=sys.executable, asked=str(asked)))
    (tmp_path / "vllm").chmod(0o755)
    text = render_machines(plan)
    for placeholder, address in ADDRESSES.items():
        text = text.replace(placeholder, address)
    parts = re.split(r"(?m)^(?=# (?:On machine \d|Beside them))", text)[1:]
    search_path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    with started(parts, search_path):
        client = ServerClient(f"http://127.0.0.1:{port}")
        eventually(client.healthy)
        answers = Counter(
            client.completions({"prompt": "a", "max_tokens": 1}, timeout_s=60)[0]["text"] for _ in range(6)
        )
    decode = {"127.0.0.1 4,5,6,7 127.0.0.1", "127.0.0.2 0,1,2,3 127.0.0.2", "127.0.0.2 4,5,6,7 127.0.0.2"}
    assert answers == dict.fromkeys((f"kv_consumer {where}" for where in decode), 2)
    read = Counter(line for line in asked.read_text().splitlines() if line.startswith("kv_producer"))
    assert read == {"kv_producer 127.0.0.1 0,1,2,3 127.0.0.1": 6}
