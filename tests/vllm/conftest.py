"""Real vLLM servers for the tests. Each is started once, by the test worker that asks first."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.env import EXPERT_SERIES
from moe_optimizer.inspection.hardware_probe import probe_hardware
from moe_optimizer.inspection.kernel_inventory import read_kernel_inventory
from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.inspection.vllm_installation import find_vllm
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.launch import ServerInfo, running
from moe_optimizer.measure.live.servers import servers_of
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.planner import PlanRequest, make_plan
from moe_optimizer.profiles import load_profile
from moe_optimizer.proof.record import Proof, read_proofs
from moe_optimizer.proof.table import Row, proof_rows
from moe_optimizer.proof.verdict import model_holders
from moe_optimizer.specs.expert_load import PlacementLoad
from moe_optimizer.specs.software import SoftwareSpec
from tests import shadowing
from tests.builders import placement_load, profile_with, tiny_moe
from tests.eventually import eventually
from tests.free_ports import free_port
from tests.shared_result import folder_of_all_workers, made_once
from tests.vllm.counted import Counted, count_one_request
from tests.vllm.scraped import Watched, watch
from tests.vllm.server_forks import ANEW, forks_for_popen

ROOT = Path(__file__).resolve().parents[2]
TINY_MOE = ROOT / "examples" / "tiny-moe"
READY_TIMEOUT_S = 1500.0
FORKED = Path(__file__).resolve().parent / "forked"
"""A folder for PYTHONPATH: a server whose Python finds it forks its engine and workers."""
_SPAWNED = FORKED.with_name("spawned")
COMPILES = {"MOE_TEST_COMPILES": "1"}
"""In the environment of a server that compiles its model; the others run vLLM's functions as they are written."""
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
    proofs: tuple[Proof, ...]
    run_dir: Path
    info: ServerInfo | None = None
    """None for a server that was not started by the launcher."""
    counted: Counted | None = None
    """What it counted for one more request; None where nobody asked."""
    watched: Watched | None = None
    """What was seen while it answered everything once more; None where nobody asked."""


def plan_here(*vllm_args: str, model: Path = TINY_MOE, **request: Any) -> Plan:
    """Return a plan of the model on this machine, as the command line makes it; `request` are fields of PlanRequest."""
    fields: dict[str, Any] = {
        "hardware": probe_hardware(),
        "profile": load_profile("balanced"),
        "port": free_port(),
        "max_model_len": 512,
        "batch_size": 8,
    }
    return make_plan(
        PlanRequest(
            model=ModelInspector().inspect(model),
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
        # Without a measurement vLLM's own kernel would compute.
        wishes=resolve_wishes(() if "flash-dmoe" in disabled else ("flash-dmoe",), disabled),
        required=frozenset(required),
        expert_load=expert_load,
    )


def ask(
    base_url: str, prompts: Sequence[str] | Sequence[list[int]] = PROMPTS, *, model: str | None = None
) -> tuple[Answer, ...]:
    """Complete all prompts in one request, by the server's first model if none is named."""
    body = {
        "model": model or ServerClient(base_url).models()[0],
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


def spawning() -> dict[str, str]:
    """Return the environment of a server that starts Python for its engine and workers, as vLLM does by default."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [folder for folder in folders if folder not in ("", str(FORKED))]
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(_SPAWNED), *kept])}


@pytest.fixture(scope="session", autouse=True)
def _server_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing from outside, no network, one compile cache for the servers of all workers, forks where nobody asks for
    `spawning` or `ANEW`."""
    shared = folder_of_all_workers(tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("MOE_OPTIMIZER_"):
                patch.delenv(name)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("VLLM_CACHE_ROOT", str(shared / "vllm_cache"))
        patch.setenv("PYTHONPATH", str(FORKED), prepend=os.pathsep)
        with forks_for_popen():
            yield


@pytest.fixture(scope="session", autouse=True)
def _needs_cpu_vllm() -> None:
    vllm = find_vllm()
    if vllm is None or vllm.device != "cpu":
        pytest.skip("needs vLLM's CPU build")


@pytest.fixture(scope="session")
def serve_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Served]:
    """Serves a plan through the launcher, asks all prompts, stops the server; reads it where a worker has done so."""

    def serve(name: str, plan: Plan, *, count: bool = False, **environment: str) -> Served:
        return made_once(
            folder_of_all_workers(tmp_path_factory),
            name,
            lambda: _served(plan, tmp_path_factory.mktemp("run"), environment, count=count),
        )

    return serve


def _served(plan: Plan, run_dir: Path, environment: dict[str, str], *, count: bool) -> Served:
    # None of vLLM's processes imports what lies where the server is started.
    executed = shadowing.lay(run_dir.with_name(f"{run_dir.name}-started-here"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(executed.parent)
        if count:
            patch.setenv(EXPERT_SERIES, "1")  # what /metrics then shows is compared with the files
        for name, value in environment.items():
            patch.setenv(name, value)
        with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
            answers = ask(info.base_url)
            counted = count_one_request(info) if count else None
            watched = _watched(run_dir) if count else None
            assert list(executed.iterdir()) == []
            return Served(answers, info.proofs, info.run_dir, info, counted, watched)


def _watched(run_dir: Path) -> Watched:
    (server,) = servers_of(str(run_dir))
    folder = run_dir.with_name(f"{run_dir.name}-prometheus")
    return watch(server, lambda: ask(server.client.base_url), folder)


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


def compiled_fp32_plan() -> Plan:
    """Return a plan that changes nothing of vLLM's defaults but what is served, so that both sides compile alike."""
    plan = tiny_plan()
    return plan.replace(serve_args=plan.plain_args + ServeArguments("--max-num-seqs", "8"))


@pytest.fixture(scope="session")
def stock_fp32(serve_once: Callable[..., Served]) -> Served:
    """Stock vLLM: the plan is there, and the kill switch too. Compiled, as by default."""
    return serve_once("stock_fp32", compiled_fp32_plan(), MOE_OPTIMIZER_DISABLE="1", **COMPILES)


@pytest.fixture(scope="session")
def ours_fp32(stock_fp32: Served, serve_once: Callable[..., Served]) -> Served:
    """Our kernel in the same configuration, after stock vLLM has filled the compile cache. Its API server starts Python
    and imports vLLM, beside modules of the same names (`shadowing`)."""
    return serve_once("ours_fp32", compiled_fp32_plan(), count=True, **ANEW, **COMPILES)


@pytest.fixture(scope="session")
def ours_expert_parallel(serve_once: Callable[..., Served]) -> Served:
    """Our kernel on two workers with half of the experts each, placed by load, with drafts from the prompt."""
    plan = tiny_plan(
        "--enforce-eager", "--tensor-parallel-size", "2", "--enable-expert-parallel",
        required=("expert_placement", "speculation"), expert_load=placement_load(tiny_moe()),
    )  # fmt: skip
    return serve_once("ours_expert_parallel", plan, count=True)


PROFILE_WITHOUT_COUNTS = "name: no_counts\npasses: {expert_load: {mode: off}, flash_dmoe: {mode: on}}\n"


@pytest.fixture(scope="session")
def plain_tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Plain vLLM that finds a profile and plans by itself: two workers with half of every expert each."""
    return made_once(
        folder_of_all_workers(tmp_path_factory),
        "plain_tensor_parallel",
        lambda: _serve_plain_tensor_parallel(tmp_path_factory.mktemp("plain")),
    )


def _serve_plain_tensor_parallel(folder: Path) -> Served:
    (folder / "profile.yaml").write_text(PROFILE_WITHOUT_COUNTS)
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        **spawning(),
        "MOE_OPTIMIZER_PROFILE": str(folder / "profile.yaml"), "MOE_OPTIMIZER_RUN_DIR": str(folder / "run"),
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
    }  # fmt: skip

    def workers_that_ran() -> int:
        return sum(proof.passes["flash_dmoe"].ran for proof in model_holders(read_proofs(folder / "run")))

    arguments = ("--dtype", "float32", "--enforce-eager", "--logprobs-mode", "raw_logits")
    with plain_server(*arguments, "--tensor-parallel-size", "2", **environment) as url:
        answers = ask(url)
        # Nobody has waited for them as the launcher does, and a process that is ended writes no more.
        eventually(lambda: workers_that_ran() == 2, "our kernel did not run in both workers")
    return Served(answers, read_proofs(folder / "run"), folder / "run")


# Stands in for the op's module in every process of the server, before anybody imports the real one.
_BROKEN_KERNEL = """
import sys, types
broken = types.ModuleType("moe_optimizer.ops.fused_experts")
def fused_experts(*args, **kwargs):
    raise RuntimeError("injected")
broken.fused_experts = fused_experts
broken.why_reference = lambda *args: None
sys.modules[broken.__name__] = broken
"""


@dataclass(frozen=True)
class Offline:
    """What an engine without a server answered (`offline`), and what its process wrote."""

    plan: Plan
    answers: tuple[Answer, ...]
    perplexity: float
    """Of the bundled model's held-out text."""
    proofs: tuple[Proof, ...]

    def row(self, pass_name: str) -> Row:
        """Return a pass's row of the launcher's table."""
        (row,) = [row for row in proof_rows(self.plan, self.proofs) if row.pass_name == pass_name]
        return row


FOUR_BITS = {"mxfp4": 32, "int4": 64}
"""Format -> group. The formats have kernels, converters and ops of their own. Both have 4.25 bits."""


def _offline_plans() -> dict[str, Plan]:
    broken = {"broken kernel": tiny_plan("--enforce-eager", dtype="bfloat16")}
    return broken | {
        name: plan_here(
            "--enforce-eager", profile=profile_with("balanced", {"four_bit": {"format": name, "group": group}}),
            wishes={"four_bit": (Wish.ON, "test")}, dtype="bfloat16", max_model_len=520,
        )
        for name, group in FOUR_BITS.items()
    }  # fmt: skip


@pytest.fixture(scope="session")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Offline]:
    """Engines in forks of one process: our kernel raises, and vLLM's own computes; experts in each four-bit format."""
    folder = folder_of_all_workers(tmp_path_factory)
    return made_once(folder, "offline", lambda: _answered_offline(tmp_path_factory.mktemp("offline")))


def _answered_offline(folder: Path) -> dict[str, Offline]:
    # Raw logits say nothing of a text's likelihood.
    text = (TINY_MOE / "heldout.txt").read_text(encoding="utf-8")
    return answered_offline(
        folder, _offline_plans(), texts=dict.fromkeys(FOUR_BITS, text), stand_ins={"broken kernel": _BROKEN_KERNEL}
    )


def answered_offline(
    folder: Path,
    plans: Mapping[str, Plan],
    *,
    texts: Mapping[str, str] = {},
    stand_ins: Mapping[str, str] = {},
    reloads: Mapping[str, Path] = {},
) -> dict[str, Offline]:
    """Serve plans without a server, one after the other in forks of one process that has imported vLLM.

    Args:
        folder: gets a run folder for each.
        plans: by name.
        texts: name -> text whose perplexity is asked for.
        stand_ins: name -> code that is executed before anything of the plan is loaded.
        reloads: name -> folder whose weights are loaded into the running engine before it answers.
    """
    for name, plan in plans.items():
        run_dir = folder / name
        run_dir.mkdir(mode=0o700)
        (run_dir / "plan.json").write_text(plan.to_json())
        asked = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS, "text": texts.get(name, "")}
        asked["reload"] = str(reloads.get(name, ""))
        (run_dir / "request.json").write_text(json.dumps(asked))
        if name in stand_ins:
            (run_dir / "stand_in.py").write_text(stand_ins[name])
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.offline", *(str(folder / name) for name in plans)],
        cwd=ROOT, env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **COMPILES}, capture_output=True, text=True,
        timeout=READY_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: _read_offline(plan, folder / name) for name, plan in plans.items()}


def _read_offline(plan: Plan, run_dir: Path) -> Offline:
    found = json.loads((run_dir / "answers.json").read_text())
    answers = tuple(
        Answer(tuple(tokens), tuple({int(token): value for token, value in position.items()} for position in best))
        for tokens, best in found["answers"]
    )
    return Offline(plan, answers, found["perplexity"] or math.nan, read_proofs(run_dir))


@pytest.fixture(scope="session")
def ours_bf16(serve_once: Callable[..., Served]) -> Served:
    """Our kernel as it is planned by default."""
    return serve_once("ours_bf16", tiny_plan("--enforce-eager", dtype="bfloat16"))
