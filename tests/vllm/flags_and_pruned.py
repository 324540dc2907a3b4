"""One server for two claims: what flags carry out is carried out, and 2:4 pruned experts compute. Then it is killed."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_optimizer.errors import ExitCode, ServerFailedError
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.launch import ServerInfo
from moe_optimizer.launcher.replica_traffic import prompt_tokens
from moe_optimizer.launcher.run_folder import RunFolder
from moe_optimizer.launcher.traffic import Traffic, read_traffic
from moe_optimizer.plan.decision import Applier, Status, Wish
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from tests.builders import profile_with
from tests.eventually import eventually
from tests.served_until import serve
from tests.shared_result import folder_of_all_workers, made_once
from tests.vllm.conftest import READY_TIMEOUT_S, Answer, ask, plan_here
from tests.vllm.heldout import heldout_perplexity

MAX_MODEL_LEN, MAX_NUM_SEQS = 520, 6
EAGER_FP8_CACHE = {"kv_cache": {"dtype": "fp8"}, "graph_capture": {"eager": True}}


@dataclass(frozen=True)
class Seen:
    """What the server answered and said, and how it ended."""

    plan: Plan
    info: ServerInfo
    answers: tuple[Answer, ...]
    perplexity: float
    """On the bundled model's held-out text."""
    prompt_tokens: int | None
    metrics: str
    traffic: Traffic
    stopped: Traffic
    """While its engine stood still, with a request that it was given then."""
    health_when_marked: tuple[int, bool]
    """Status of /health once the launcher has marked the folder, and whether it says when to come again."""
    end: str = ""
    exit_code: ExitCode = ExitCode.OK

    @property
    def arguments(self) -> str:
        """What vLLM says it was started with beyond its defaults."""
        log = self.info.log_path.read_text(encoding="utf-8", errors="replace")
        return next(line for line in log.splitlines() if "non-default args" in line)


def flags_and_pruned(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Return what was seen of the server, which is started for the first test worker that asks."""
    folder = folder_of_all_workers(tmp_path_factory)
    return made_once(folder, "flags_and_pruned", lambda: _serve(_plan(), tmp_path_factory.mktemp("run")))


def _plan() -> Plan:
    """Return a plan with every flag of the passes, and one worker whose experts are pruned by magnitude alone."""
    plan = plan_here(
        profile=profile_with(passes=EAGER_FP8_CACHE, performance="interactivity"),
        wishes={"sparsity_24": (Wish.ON, "test")}, required=frozenset({"sparsity_24"}),
        dtype="bfloat16", max_model_len=MAX_MODEL_LEN, batch_size=MAX_NUM_SEQS,
    )  # fmt: skip
    # One flag that is planned and not given: what vLLM makes of it must be seen.
    dropped = dataclasses.replace(
        plan.decision("parallelism"),
        status=Status.ON, applier=Applier.FLAGS, vllm_args=ServeArguments("--data-parallel-size", "2"), value="DP=2",
    )  # fmt: skip
    decisions = tuple(dropped if each.pass_name == "parallelism" else each for each in plan.decisions)
    return plan.replace(decisions=decisions)


def _serve(plan: Plan, run_dir: Path) -> Seen:
    visits: list[Seen] = []

    def visit(info: ServerInfo) -> None:
        answers = ask(info.base_url)
        perplexity = heldout_perplexity(info)
        with urllib.request.urlopen(f"{info.base_url}/metrics", timeout=300) as response:
            metrics = response.read().decode()
        counted = prompt_tokens(ServerClient(info.base_url))
        traffic = eventually(lambda: _traffic(ServerClient(info.base_url)), "the server does not tell its traffic")
        (engine,) = [proof.pid for proof in info.proofs if proof.role == "engine"]
        stopped = _stopped(engine, ServerClient(info.base_url))
        RunFolder(run_dir).set_draining()
        visits.append(Seen(plan, info, answers, perplexity, counted, metrics, traffic, stopped, _health(info.base_url)))
        os.kill(engine, signal.SIGKILL)

    with pytest.raises(ServerFailedError) as caught:
        serve(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S, on_ready=visit)
    assert visits, caught.value
    return dataclasses.replace(visits[0], end=str(caught.value), exit_code=caught.value.exit_code)


def _traffic(client: ServerClient) -> Traffic | None:
    """Return the traffic of the only engine; None where the server does not answer in the two seconds it is given."""
    try:
        return (read_traffic(client) or {}).get("0")
    except OSError:
        return None


def _stopped(engine: int, client: ServerClient) -> Traffic:
    """Stop an engine that has nothing to do, give it a request, and let it go on once the request is counted."""

    def counted() -> Traffic | None:
        found = _traffic(client)
        return found if found is not None and found.unfinished else None

    os.kill(engine, signal.SIGSTOP)
    try:
        asked = threading.Thread(target=client.complete, args=("def",), kwargs={"max_tokens": 2, "timeout_s": 300.0})
        asked.start()
        seen = eventually(counted, "the request was not counted")
    finally:
        os.kill(engine, signal.SIGCONT)
    asked.join()
    return seen


def _health(base_url: str) -> tuple[int, bool]:
    try:
        with urllib.request.urlopen(f"{base_url}/health", timeout=300) as response:
            return response.status, False
    except urllib.error.HTTPError as error:
        return error.code, "Retry-After" in error.headers
