"""Serves a model once with plain vLLM and the installed wheel, with no compiler within reach, and says what ran.

    cd /somewhere/else && python -P CHECKOUT/scripts/try_installed.py CHECKOUT/examples/tiny-moe

For an environment that has vLLM's CPU build and the wheel, and nothing of the checkout. Exit code 0: the server
answered, and our kernel computed in every worker; 1: not, with the reason.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moe_optimizer import __file__ as package
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.proof.record import PassProof, read_proofs
from moe_optimizer.proof.verdict import model_holders

READY_S = 600.0
STOP_S = 60.0
PROVEN_S = 30.0
"""A worker writes its proof about once a second."""
COMPILER = re.compile(r"(^|-)(cc|c\+\+|gcc|g\+\+|cpp|clang|clang\+\+|nvcc|ld|as|cmake|ninja)(-[\d.]+)?$")
PROFILE = "name: installed\ndescription: our kernel whether it was measured or not\npasses: {flash_dmoe: {mode: on}}\n"
"""A first start of plain vLLM has no measured speeds, and leaves the experts to vLLM."""


def main(model: Path) -> int:
    """Start, ask, stop, and look at the proofs."""
    if Path(package).parents[1] == Path(__file__).resolve().parents[1]:
        print(f"tried is {package}: got the checkout, expected an installed wheel", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        answer, why_not = served(model.resolve(), Path(folder))
        entries = kernels_of(Path(folder) / "run")
        if why_not or not entries or not all(each.ran for each in entries):
            print((Path(folder) / "log").read_text(errors="replace"), file=sys.stderr)
            print(why_not or f"our kernel did not run: {entries}", file=sys.stderr)
            return 1
        names = {f"{each.kernel}, {each.isa}" for each in entries}
        print(f"{package}: answered {answer!r}; {'; '.join(sorted(names))} in {len(entries)} workers")
    return 0


def kernels_of(run_dir: Path) -> list[PassProof]:
    """Return what each worker says of our kernels."""
    entries = [proof.passes.get("flash_dmoe") for proof in model_holders(read_proofs(run_dir))]
    return [each for each in entries if each is not None]


def link_programs(folder: Path) -> None:
    """Make a folder of all programs on PATH but compilers: vLLM asks lscpu, and others may ask for more."""
    folder.mkdir()
    for program in (each for place in os.get_exec_path() if Path(place).is_dir() for each in Path(place).iterdir()):
        if not COMPILER.search(program.name) and not (folder / program.name).is_symlink():
            (folder / program.name).symlink_to(program)


def served(model: Path, folder: Path) -> tuple[str, str]:
    """Return what a server answered, and why it did not."""
    link_programs(folder / "bin")
    (folder / "profile.yaml").write_text(PROFILE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": str(folder / "bin"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "MOE_OPTIMIZER_PROFILE": str(folder / "profile.yaml"),
        "MOE_OPTIMIZER_RUN_DIR": str(folder / "run"),
    }
    # Without --enforce-eager vLLM itself compiles, for which it needs a compiler.
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--port", str(port), "--max-model-len", "256", "--enforce-eager"]
    client = ServerClient(f"http://127.0.0.1:{port}")
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        deadline = time.monotonic() + READY_S
        while not client.healthy():
            if server.poll() is not None:
                return "", f"the server ended with exit code {server.returncode}"
            if time.monotonic() > deadline:
                return "", f"not ready after {READY_S:.0f} s"
            time.sleep(1)
        answer = client.complete("def __init__(self", max_tokens=8, timeout_s=60)
        deadline = time.monotonic() + PROVEN_S
        while time.monotonic() < deadline and not all(each.ran for each in kernels_of(folder / "run")):
            time.sleep(1)
        return answer, ""
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(STOP_S)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
