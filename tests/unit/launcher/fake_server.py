"""Stands in for vLLM in launcher tests: serves /health, starts children, writes proofs, and misbehaves on request.

Usage: fake_server.py PORT BEHAVIOUR...
  refuse      write a proof that says why the pass is not applied
  slower      beside "refuse": the worker has timed it no faster than vLLM's own
  wide        write a proof that says that what vLLM carries out is not so
  unproven    write no proof
  die         print an error and end with status 3 before listening
  usage       end as argparse does with arguments it does not take
  config      end as vLLM does with a configuration it does not take
  weights     end with a ValueError, but while loading weights
  silent      never listen
  leave       end with status 0 as soon as it has named its model
  vanish      end with status 0 as soon as it was healthy once
  break       end with status 0 in the middle of naming its model
  mute        log that it was asked for a completion, and give none
  stubborn    ignore SIGTERM
  escape      start a child that leaves the session
  alone       receive no prompt's cache from another server
  countless   publish no counts
  idle        count no prompt that it takes
  untiered    copy no blocks to host memory
  compile     compile something for each new shape of a completion
  restless    compile something for every completion
  sampler     compile something for the first completion with top_k
  count       count what it compiles, which is nothing
  stall       have a request with which it gets nowhere
  pause       say that it is paused
  killed      say that a process of its own was killed and end with status 0, when it has named its model
  misdecode   give tokens another log-probability when they are decoded
  compared    write into its proof what the canary says of a graph, when it is asked for a completion
  wrong       write into its proof that the canary failed, and end with status 1, when it is asked for a completion
  fragile     end with status 0 when it is asked for a completion
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REFUSALS = {
    "usage": ("api_server.py: error: argument --dtype: invalid choice: 'cheese'", 2),
    "config": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, max_model_len (9) is greater than 8 [type=value_error, input_value=ArgsKwargs()]",
        1,
    ),
    "weights": ("Loading safetensors checkpoint shards:   0% Completed | 0/1\nValueError: a weight of 3 bits", 1),
}
METRICS = """\
vllm:num_requests_running{engine="0"} %d.0
vllm:request_success_total{engine="0"} 5.0
vllm:cache_config_info{block_size="16",engine="0"} 1.0
vllm:external_prefix_cache_hits_total{engine="0"} %d.0
vllm:prompt_tokens_total{engine="0"} %d.0
"""
TIERED = 'vllm:kv_offload_store_bytes_total{engine="0"} %d.0\n'
CHILD = ("sh", "-c", "trap '' TERM; exec sleep 600")
PROOF_SCHEMA_VERSION = 1
"""Of `moe_optimizer.proof.record`, which refuses a proof of another."""


def main() -> None:
    port, behaviour = int(sys.argv[1]), set(sys.argv[2:])
    # At once: an exception from a signal handler can come where Python drops it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in behaviour else lambda *_: os._exit(0))
    child = subprocess.Popen(CHILD, start_new_session="escape" in behaviour)
    print(f"fake server, child {child.pid}, restarts {os.environ['MOE_OPTIMIZER_RESTARTS']}", flush=True)
    if "die" in behaviour:
        print("RuntimeError: the model is made of cheese", flush=True)
        sys.exit(3)
    for refusal in REFUSALS.keys() & behaviour:
        text, status = REFUSALS[refusal]
        print(text, flush=True)
        sys.exit(status)
    if "unproven" not in behaviour:
        write_proof(child.pid, behaviour)
    if "silent" in behaviour:
        time.sleep(600)
    Server(behaviour, child.pid).serve(port)


def write_proof(pid: int, behaviour: set[str]) -> None:
    """Write what a worker would, by its JSON alone: importing what reads and checks plans takes longer than a test."""
    refused, wide = "refuse" in behaviour, "wide" in behaviour
    path = Path(os.environ["MOE_OPTIMIZER_PLAN"])
    plan = json.loads(path.read_text(encoding="utf-8"))
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]
    layer = {
        "name": "0", "num_local_experts": 8, "hidden_size": 4, "intermediate_size": 2, "dtype": "float32",
        "expert_map": False, "calls": 1,
    }  # fmt: skip
    passes = {
        "flash_dmoe": {
            "requested": "x", "applied": not refused, "ran": not refused,
            "why_not": "fallback: cheese" if refused else "", "layers": [] if refused else [layer],
            "timed_no_faster": "slower" in behaviour,
        }
    }  # fmt: skip
    for decision in plan["decisions"]:
        fp8_checkpoint = decision["pass_name"] == "fp8" and decision["params"] is None
        if decision["status"] == "on" and (decision["applier"] == "flags" or fp8_checkpoint):
            passes[decision["pass_name"]] = {
                "requested": decision["value"], "applied": not wide, "ran": not wide,
                "why_not": "not in FP8: bfloat16" if wide else "",
            }  # fmt: skip
    proof = {
        "schema_version": PROOF_SCHEMA_VERSION, "role": "worker", "rank": 0, "pid": pid, "plan_digest": digest,
        "versions": {}, "world_size": 1, "model_rank": 0, "passes": passes,
    }  # fmt: skip
    written = path.parent / "proof" / f"worker-0-{pid}.json"
    written.parent.mkdir(exist_ok=True)
    partial = written.with_suffix(".partial")
    partial.write_text(json.dumps(proof), encoding="utf-8")
    partial.replace(written)


def write_canary(canary: str, why_not: str = "") -> None:
    """Write into the proof what the canary of the experts says now."""
    from moe_optimizer.proof.record import ProofWriter, read_proofs

    folder = Path(os.environ["MOE_OPTIMIZER_PLAN"]).parent
    (proof,) = read_proofs(folder)
    entry = proof.passes["flash_dmoe"]
    entry.canary, entry.why_not = canary, why_not
    ProofWriter(folder, proof).write()


_compiled: list[object] = []
COUNTING = {"compile", "restless", "sampler", "count"}


def compile_for(body: dict[str, Any], behaviour: set[str]) -> None:
    """Count in the proof what a completion compiles; the log says whether it is of a warm-up."""
    from moe_optimizer.proof.record import WARMING_FILE, CompilationProof, ProofWriter, read_proofs

    folder = Path(os.environ["MOE_OPTIMIZER_PLAN"]).parent
    print("warming" if (folder / WARMING_FILE).exists() else "serving", flush=True)
    prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
    shape: object = [len(prompts), len(prompts[0]), sorted(body)]
    if "restless" in behaviour:
        shape = len(_compiled)
    elif "sampler" in behaviour:
        shape = "a sampler" if "top_k" in body else None
    elif "count" in behaviour:
        shape = None
    if shape is None or shape in _compiled:
        return
    _compiled.append(shape)
    (proof,) = read_proofs(folder)
    proof.compilations = CompilationProof(before_ready=len(_compiled))
    ProofWriter(folder, proof).write()


def choices(body: dict[str, Any], misdecodes: bool) -> list[dict[str, Any]]:
    """Return an answer to each prompt, always the same tokens."""
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    count = body.get("max_tokens", 1)
    value = -3.0 if misdecodes and count > 1 else -0.5
    logprobs = {
        "tokens": ["token_id:7"] * count,
        "token_logprobs": [value] * count,
        "top_logprobs": [{f"token_id:{7 + place}": value - place for place in range(5)}] * count,
    }
    return [{"index": index, "text": "hello", "logprobs": logprobs} for index in range(len(prompts))]


class Server:
    """Answers one request after another. Python's own server takes three times as long to import as all of this."""

    def __init__(self, behaviour: set[str], child: int) -> None:
        last = {"leave": "/v1/models", "vanish": "/health", "break": "/v1/models"}
        self.behaviour, self.child = behaviour, child
        self.last_paths = {path for name, path in last.items() if name in behaviour}
        self.received = self.asked = 0

    def serve(self, port: int) -> None:
        with socket.create_server(("127.0.0.1", port)) as listener:
            while True:
                connection, _ = listener.accept()
                with contextlib.suppress(ConnectionError), connection, connection.makefile("rwb") as stream:
                    self.answer(stream)

    def answer(self, stream: io.BufferedRWPair) -> None:
        method, path, _ = (stream.readline() or b"GET / HTTP/1.0").decode().split()
        length = 0
        while header := stream.readline().strip():
            name, _, value = header.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        if method == "POST":
            self.send(stream, self.completed(json.loads(stream.read(length))))
        else:
            self.get(stream, path)

    def get(self, stream: io.BufferedRWPair, path: str) -> None:
        if path.startswith("/metrics"):
            taken = 0 if "idle" in self.behaviour else self.asked
            counts = (int("stall" in self.behaviour), self.received, taken)
            page = METRICS % counts + ("" if "untiered" in self.behaviour else TIERED % (4096 * self.asked))
            self.send(stream, "" if "countless" in self.behaviour else page)
            return
        if path.startswith("/is_paused"):
            self.send(stream, json.dumps({"is_paused": "pause" in self.behaviour}))
            return
        cut_off = 9 if "break" in self.behaviour else 0
        self.send(stream, json.dumps({"data": [{"id": "fake", "max_model_len": 64}]}), cut_off)
        if "killed" in self.behaviour and path == "/v1/models":
            print(f"moe-optimizer: process {self.child} was killed by SIGKILL", flush=True)
            os._exit(0)
        if path in self.last_paths:
            os._exit(0)

    def completed(self, body: dict[str, Any]) -> str:
        if "fragile" in self.behaviour:
            os._exit(0)
        if "compared" in self.behaviour:
            write_canary("passed before ready: 1 layers; passed in 1 of 2 of vLLM's graphs")
        if "wrong" in self.behaviour:
            write_canary("failed before ready: a graph", "canary before ready: a graph")
            print("RequiredNotAppliedError: a graph", flush=True)
            os._exit(1)
        self.asked += 1
        if self.behaviour & COUNTING:
            compile_for(body, self.behaviour)
        if "mute" in self.behaviour:
            print("asked", flush=True)
            time.sleep(600)
        if "alone" not in self.behaviour:
            self.received += 16
        return json.dumps({"choices": choices(body, "misdecode" in self.behaviour)})

    @staticmethod
    def send(stream: io.BufferedRWPair, text: str, cut_off: int = 0) -> None:
        body = text.encode()
        stream.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body[: len(body) - cut_off])
        stream.flush()


if __name__ == "__main__":
    main()
