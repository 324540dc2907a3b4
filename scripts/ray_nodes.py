"""Starts one server over several Ray nodes of this host, with the commands that `plan --render ray` prints for it.

    python scripts/ray_nodes.py MODEL [--nodes 2] [--limit-s 200] [--out FILE] [-- arguments of moe-optimizer plan]

Each node gets one GPU by CUDA_VISIBLE_DEVICES and runs its commands as they are printed, with this host's address in
place of HEAD and ADDRESS. The server is asked once; the answer, the proof and which node each worker ran on are shown.
Then everything that was started is ended. Exit code 0: answered, and every required pass ran in every worker.

Needs `ray` and `vllm` on PATH, and that no Ray runs on this host: its ports are those of the printed commands.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from server_http import ServerError, answer_of, post_json

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_optimizer import env  # noqa: E402
from moe_optimizer.plan.machine_commands import render_machines  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.proof.outcome import judge  # noqa: E402
from moe_optimizer.proof.record import Proof, read_proofs  # noqa: E402
from moe_optimizer.proof.verdict import NO_WORKER  # noqa: E402
from moe_optimizer.server_processes import kill_members  # noqa: E402

STOP_S = 40.0
"""Of the limit: to stop vLLM and Ray."""
PROOF_S = 10.0
"""Proofs are written within a second of a step."""
POLL_S = 0.5
PROMPT = list(range(1, 17))
"""Token ids, so that models without a tokenizer answer too."""


class NodesError(Exception):
    """A step did not work."""


def main() -> int:
    """Start, ask, show, stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=200.0, help="for all of it, the end included")
    parser.add_argument("--address", default=None, help="of this host (default: what its name stands for)")
    parser.add_argument("--out", type=Path, help="write what was seen as JSON")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, more = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    if Path(options.model).is_dir():
        options.model = str(Path(options.model).resolve())
    deadline = time.monotonic() + options.limit_s - STOP_S
    with tempfile.TemporaryDirectory(prefix="ray-nodes-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        started: list[subprocess.Popen[bytes]] = []
        try:
            seen = run(options, more, folder, started, deadline)
        except (NodesError, ServerError) as error:
            print(f"failed: {error}", file=sys.stderr)
            for path in sorted(folder.glob("*.log")):
                print(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}", file=sys.stderr)
            return 1
        finally:
            stop(started, folder / "plan.json")
    if options.out:
        options.out.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    return int(bool(seen["missing"]))


def run(
    options: Any, more: list[str], folder: Path, started: list[subprocess.Popen[bytes]], deadline: float
) -> dict[str, Any]:
    """Return what was seen of a server that answered.

    Raises:
        NodesError: a command failed or took too long.
        ServerError: the server did not answer the request.
    """
    plan = planned(options, more, folder)
    text = render_machines(plan)
    print(text, flush=True)
    address = options.address or own_address()
    head, other, serve = (substituted(block, address, folder) for block in blocks(text))
    begun = time.monotonic()
    for node in range(options.nodes):
        shell(other if node else head, folder, f"node-{node}", gpu=node, limit_s=deadline - time.monotonic())
    wait_for_nodes(options.nodes, f"{address}:6379", folder, deadline)
    nodes_s = time.monotonic() - begun
    # The server is driven from the first machine: it sees that machine's GPU alone.
    with (folder / "serve.log").open("wb") as log:
        server = subprocess.Popen(
            ["sh", "-ec", f"export VLLM_HOST_IP={address}\n{serve}"],
            env=environment(folder, 0), stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    started.append(server)
    url = f"http://{address}:{plan.serve_args.count('--port') or 8000}"
    wait_for_server(server, url, deadline)
    ready_s = time.monotonic() - begun
    body = {"model": served_name(url), "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = post_json(f"{url}/v1/completions", body)
    proofs = wait_for_proofs(folder, options.nodes, min(deadline, time.monotonic() + PROOF_S))
    required = {decision.pass_name for decision in plan.decisions if decision.required}
    outcome = judge(plan, {"server": proofs}, required, absent=NO_WORKER, observed={})
    print(*outcome.lines(width=120), sep="\n")
    workers = [placed(proof) for proof in proofs if proof.world_size]
    for worker in workers:
        print("rank {rank}: process {pid}, GPU {gpu}, started by the Ray node of process {raylet}".format(**worker))
    print(f"{answer['usage']['completion_tokens']} tokens: {answer['choices'][0]['text']!r}")
    if len({worker["raylet"] for worker in workers}) != options.nodes:
        raise NodesError(f"workers are on {workers}, expected one on each of {options.nodes} nodes")
    return {
        "commands": text,
        "nodes_up_s": round(nodes_s, 1),
        "ready_s": round(ready_s, 1),
        "answer": answer,
        "workers": workers,
        "table": [[str(cell) for cell in (row.pass_name, row.applied, row.ran, row.why_not)] for row in outcome.rows],
        "missing": list(outcome.missing),
    }


def own_address() -> str:
    """Return what this host's name stands for, or the loopback address where it stands for nothing."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def planned(options: Any, more: list[str], folder: Path) -> Plan:
    """Return the plan, which lies at plan.json of the folder."""
    command = [sys.executable, "-m", "moe_optimizer", "plan", options.model, "--gpus", str(options.nodes)]
    layout = [] if "--layout" in more else ["--layout", f"tp1pp{options.nodes}"]
    command += ["--nodes", str(options.nodes), *layout, "--json", *more]
    # One GPU is seen: the plan is for machines that have one each.
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},
    )  # fmt: skip
    if done.returncode:
        raise NodesError(f"{' '.join(command)}: {done.stderr}")
    (folder / "plan.json").write_text(done.stdout, encoding="utf-8")
    return Plan.load(folder / "plan.json")


def blocks(text: str) -> tuple[str, str, str]:
    """Return the commands of the first machine, of each other one, and those that start the server."""
    found = [block for block in re.split(r"(?:^#.*\n|^\n)+", text, flags=re.MULTILINE) if block.strip()]
    if len(found) != 3:
        raise NodesError(f"got {len(found)} blocks of commands, expected first machine, others, server")
    return found[0], found[1], found[2]


def substituted(block: str, address: str, folder: Path) -> str:
    """Return a block with what stands for addresses and folders filled in."""
    filled = re.sub(r"\b(HEAD|ADDRESS)\b", address, block)
    return re.sub(r"\bRUN_DIR\b", str(folder), filled)


def environment(folder: Path, gpu: int) -> dict[str, str]:
    """Return a node's environment: its GPU, and the plan, by which every process of it is found in the end."""
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": str(gpu),
        env.PLAN: str(folder / "plan.json"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def shell(block: str, folder: Path, name: str, *, gpu: int, limit_s: float) -> None:
    """Run a block of commands to its end."""
    with (folder / f"{name}.log").open("wb") as log:
        try:
            subprocess.run(
                ["sh", "-ec", block], env=environment(folder, gpu), stdout=log, stderr=log, check=True,
                timeout=max(1.0, limit_s), start_new_session=True,
            )  # fmt: skip
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise NodesError(f"{name}: {error}") from error


def wait_for_nodes(count: int, address: str, folder: Path, deadline: float) -> None:
    """Wait until `ray status` shows so many nodes."""
    active = ""
    while time.monotonic() < deadline:
        done = subprocess.run(
            ["ray", "status", "--address", address], env=environment(folder, 0), capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip
        active = done.stdout.partition("Active:")[2].partition("Pending:")[0]
        if len(re.findall(r"\bnode_\w+", active)) >= count:
            return
        time.sleep(POLL_S)
    raise NodesError(f"ray status: got {active!r}, expected {count} nodes")


def wait_for_server(server: subprocess.Popen[bytes], url: str, deadline: float) -> None:
    """Wait until the server answers for its health."""
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise NodesError(f"vllm serve ended with exit code {server.returncode}")
        try:
            with answer_of(f"{url}/health"):
                return
        except ServerError:
            time.sleep(POLL_S)
    raise NodesError("vllm serve was not ready within the limit")


def served_name(url: str) -> str:
    """Return the name under which the server answers."""
    with answer_of(f"{url}/v1/models") as answer:
        return str(json.load(answer)["data"][0]["id"])


def wait_for_proofs(folder: Path, workers: int, deadline: float) -> tuple[Proof, ...]:
    """Return the proofs once every worker shows a step, or what there is at the deadline."""
    while True:
        proofs = read_proofs(folder)
        holding = [proof for proof in proofs if proof.world_size]
        if time.monotonic() > deadline or (len(holding) == workers and all(proof.memory for proof in holding)):
            return proofs
        time.sleep(POLL_S)


def placed(proof: Proof) -> dict[str, Any]:
    """Return where a worker runs: its GPU, and the Ray node that started it."""
    process = psutil.Process(proof.pid)
    visible = process.environ().get("CUDA_VISIBLE_DEVICES", "")
    return {"rank": proof.model_rank, "pid": proof.pid, "gpu": visible, "raylet": process.ppid()}


def stop(started: list[subprocess.Popen[bytes]], plan: Path) -> None:
    """End the server, then all that has the plan in its environment, Ray's processes too."""
    for server in started:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(STOP_S / 2)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
    kill_members(-1, str(plan))


if __name__ == "__main__":
    sys.exit(main())
