"""Real vLLM servers for the tests. Each is started once, asked everything, and stopped before its worker's next."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.inspection import ModelInspector, find_vllm, probe_hardware, read_kernel_inventory
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.launch import ServerInfo, running
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.planner import PlanRequest, make_plan
from moe_optimizer.profiles import load_profile
from moe_optimizer.specs.placement_load import PlacementLoad
from moe_optimizer.specs.software import SoftwareSpec
from tests.free_ports import free_port
from tests.vllm.counted import Counted, count_one_request

ROOT = Path(__file__).resolve().parents[2]
TINY_MOE = ROOT / "examples" / "tiny-moe"
READY_TIMEOUT_S = 1500.0
# Text like the model's training data, of different lengths, so that several experts and batch sizes come up.
PROMPTS = (
    "def add(a, b):\n    ",
    "import os\nimport sys\n\n",
    "class Handler:\n    def __init__(self, name):\n        self.name = name\n\n    def ",
    "for i in range(10):\n    if i % 2 == 0:\n        ",
    '"""Utilities for reading files."""\n\nfrom pathlib import Path\n\n\ndef read(path):\n    with open(path) as f:\n',
    "try:\n    value = int(text)\nexcept ValueError as error:\n    raise ",
)
MAX_TOKENS = 40


@dataclass(frozen=True)
class Answer:
    """One greedy completion: the tokens, and at each position the logits of the two best."""

    tokens: tuple[int, ...]
    best_two: tuple[dict[int, float], ...]


@dataclass(frozen=True)
class Served:
    """What a server answered, and what it said about itself."""

    answers: tuple[Answer, ...]
    info: ServerInfo | None
    """None for a server that was not started by the launcher."""
    counted: Counted | None = None
    """What it counted for one more request; None where nobody asked."""


def plan_here(*vllm_args: str, model: Path = TINY_MOE, **request: Any) -> Plan:
    """Return a plan of the model on this machine, as the command line makes it; `request` are fields of PlanRequest."""
    fields: dict[str, Any] = {
        "profile": load_profile("balanced"),
        "port": free_port(),
        "max_model_len": 512,
        "batch_size": 8,
    }
    return make_plan(
        PlanRequest(
            model=ModelInspector().inspect(model),
            hardware=probe_hardware(),
            software=SoftwareSpec(vllm=find_vllm(), kernels=read_kernel_inventory()),
            vllm_args=ServeArguments(*vllm_args),
            **(fields | request),
        )
    )


def tiny_plan(
    *vllm_args: str,
    dtype: str = "float32",
    required: Sequence[str] = (),
    disabled: Sequence[str] = (),
    expert_load: PlacementLoad | None = None,
) -> Plan:
    """Return a plan whose server gives logits where others give log-probabilities."""
    return plan_here(
        "--logprobs-mode",
        "raw_logits",
        *vllm_args,
        dtype=dtype,
        wishes=resolve_wishes((), disabled),
        required=frozenset(required),
        expert_load=expert_load,
    )


def ask(base_url: str, prompts: Sequence[str] | Sequence[list[int]] = PROMPTS) -> tuple[Answer, ...]:
    """Complete all prompts in one request."""
    body = {
        "model": ServerClient(base_url).models()[0],
        "prompt": list(prompts),
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
    }
    request = urllib.request.Request(
        f"{base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        choices = json.load(response)["choices"]
    return tuple(_answer(choice["logprobs"]) for choice in sorted(choices, key=lambda choice: choice["index"]))


def _answer(logprobs: dict[str, Any]) -> Answer:
    def token_id(text: str) -> int:
        return int(text.removeprefix("token_id:"))

    return Answer(
        tuple(map(token_id, logprobs["tokens"])),
        tuple({token_id(text): value for text, value in position.items()} for position in logprobs["top_logprobs"]),
    )


@pytest.fixture(scope="session", autouse=True)
def _server_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing from outside, no network, and one compile cache of the tests' own for all servers."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("MOE_OPTIMIZER_"):
                patch.delenv(name)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm_cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _needs_cpu_vllm() -> None:
    vllm = find_vllm()
    if vllm is None or vllm.device != "cpu":
        pytest.skip("needs vLLM's CPU build")


@pytest.fixture(scope="session")
def serve_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Served]:
    """Serves a plan through the launcher, asks all prompts, stops the server."""

    def serve(plan: Plan, *, count: bool = False, **environment: str) -> Served:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            run_dir = tmp_path_factory.mktemp("run")
            with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
                return Served(ask(info.base_url), info, count_one_request(info) if count else None)

    return serve


@contextlib.contextmanager
def plain_server(*arguments: str, **environment: str) -> Iterator[str]:
    """Start vLLM by itself, as a user would without this package's command; yields its URL."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TINY_MOE)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", *arguments]
    process = subprocess.Popen(
        command, env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **environment}, start_new_session=True
    )
    try:
        client = ServerClient(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not client.healthy():
            assert process.poll() is None, f"the server ended with {process.returncode}"
            assert time.monotonic() < deadline, "the server did not become ready"
            time.sleep(0.5)
        yield client.base_url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=120)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=120)


STOCK_ARGS = ("--logprobs-mode", "raw_logits", "--max-num-seqs", "8")


@pytest.fixture(scope="session")
def stock_fp32() -> Served:
    """vLLM with nothing of ours set; compiled, as by default."""
    with plain_server("--dtype", "float32", *STOCK_ARGS) as url:
        return Served(ask(url), None)


@pytest.fixture(scope="session")
def ours_fp32(stock_fp32: Served, serve_once: Callable[..., Served]) -> Served:
    """Our kernel in the same configuration, after stock has filled vLLM's compile cache."""
    plan = tiny_plan()
    return serve_once(plan.replace(serve_args=plan.plain_args + ServeArguments("--max-num-seqs", "8")), count=True)


@pytest.fixture(scope="session")
def ours_expert_parallel(serve_once: Callable[..., Served]) -> Served:
    """Our kernel on two workers with half of the experts each."""
    plan = tiny_plan("--enforce-eager", "--tensor-parallel-size", "2", "--enable-expert-parallel")
    return serve_once(plan, count=True)


@pytest.fixture(scope="session")
def ours_tensor_parallel(serve_once: Callable[..., Served]) -> Served:
    """Our kernel on two workers with half of every expert each; without counting, which the other servers have."""
    plan = tiny_plan("--enforce-eager", "--tensor-parallel-size", "2", disabled=("expert-load",))
    return serve_once(plan)


@pytest.fixture(scope="session")
def stock_bf16(serve_once: Callable[..., Served]) -> Served:
    """The plan is there, and the kill switch too."""
    return serve_once(tiny_plan("--enforce-eager", dtype="bfloat16"), MOE_OPTIMIZER_DISABLE="1")


@pytest.fixture(scope="session")
def ours_bf16(serve_once: Callable[..., Served]) -> Served:
    """Our kernel as it is planned by default."""
    return serve_once(tiny_plan("--enforce-eager", dtype="bfloat16"))


@pytest.fixture
def injected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Runs Python code at the start of every process that a server consists of."""

    def inject(code: str) -> None:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    return inject
