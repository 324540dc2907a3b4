"""The passes that flags carry out reach a real server, which says what it runs with. Then its engine is killed."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import urllib.request
from dataclasses import dataclass

import pytest

from moe_optimizer.errors import ExitCode, ServerFailedError
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.launch import ServerInfo
from moe_optimizer.launcher.replica_traffic import prompt_tokens
from moe_optimizer.plan.decision import Applier, Status
from moe_optimizer.plan.pass_params import KvCacheParams, SchedulerParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.proof.verdict import not_running
from tests.builders import profile_with
from tests.run_processes import processes_of
from tests.served_until import serve
from tests.vllm.conftest import PROMPTS, READY_TIMEOUT_S, Answer, ask, plan_here

pytestmark = pytest.mark.vllm
EAGER_FP8_CACHE = {"kv_cache": {"dtype": "fp8"}, "graph_capture": {"eager": True}}


@dataclass(frozen=True)
class Seen:
    """A server with every flag of these passes."""

    plan: Plan
    info: ServerInfo
    answers: tuple[Answer, ...]
    prompt_tokens: int | None
    metrics: str
    end: ServerFailedError | None = None

    @property
    def arguments(self) -> str:
        """What vLLM says it was started with beyond its defaults."""
        log = self.info.log_path.read_text(encoding="utf-8", errors="replace")
        return next(line for line in log.splitlines() if "non-default args" in line)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    profile = profile_with(passes=EAGER_FP8_CACHE, performance="interactivity")
    plan = plan_here(
        "--logprobs-mode", "raw_logits", profile=profile, dtype="bfloat16", max_model_len=500, batch_size=6
    )
    # One flag that is planned and not given: what vLLM makes of it must be seen.
    dropped = dataclasses.replace(
        plan.decision("parallelism"),
        status=Status.ON, applier=Applier.FLAGS, vllm_args=ServeArguments("--data-parallel-size", "2"), value="DP=2",
    )  # fmt: skip
    decisions = tuple(dropped if each.pass_name == "parallelism" else each for each in plan.decisions)
    plan = plan.replace(decisions=decisions)
    visits: list[Seen] = []

    def visit(info: ServerInfo) -> None:
        answers = ask(info.base_url)
        with urllib.request.urlopen(f"{info.base_url}/metrics", timeout=300) as response:
            metrics = response.read().decode()
        visits.append(Seen(plan, info, answers, prompt_tokens(ServerClient(info.base_url)), metrics))
        (engine,) = [proof.pid for proof in info.proofs if proof.role == "engine"]
        os.kill(engine, signal.SIGKILL)

    with pytest.raises(ServerFailedError) as caught:
        serve(plan, run_dir=tmp_path_factory.mktemp("run"), ready_timeout_s=READY_TIMEOUT_S, on_ready=visit)
    assert visits, caught.value
    return dataclasses.replace(visits[0], end=caught.value)


def test_the_scheduler_has_the_planned_sizes(seen: Seen) -> None:
    tokens = seen.plan.decision("scheduler").params_as(SchedulerParams).max_num_batched_tokens
    assert "'max_num_seqs': 6" in seen.arguments
    assert f"'max_num_batched_tokens': {tokens}" in seen.arguments
    assert "'performance_mode': 'interactivity'" in seen.arguments


def test_the_cache_has_the_planned_type_and_holds_the_planned_length(seen: Seen) -> None:
    (labels,) = re.findall(r"^vllm:cache_config_info\{(.*)\}", seen.metrics, re.MULTILINE)
    # FP8 where vLLM's CPU build has it.
    planned = seen.plan.decision("kv_cache").params_as(KvCacheParams)
    assert f'cache_dtype="{planned.dtype}"' in labels
    assert "'max_model_len': 500" in seen.arguments
    blocks, size = (int(re.findall(rf'{name}="(\d+)"', labels)[0]) for name in ("num_gpu_blocks", "block_size"))
    assert blocks * size >= 500


def test_nothing_is_compiled_or_captured_where_the_profile_says_eager(seen: Seen) -> None:
    assert "'enforce_eager': True" in seen.arguments


def test_it_answers(seen: Seen) -> None:
    assert len(seen.answers) == len(PROMPTS)
    assert all(answer.tokens for answer in seen.answers)


def test_the_table_names_who_carried_them_out(seen: Seen) -> None:
    rows = {row.pass_name: row for row in seen.info.rows}
    on = {decision.pass_name for decision in seen.plan.decisions if decision.status is Status.ON}
    assert {"scheduler", "graph_capture"} <= on
    for name in on & {"scheduler", "kv_cache", "graph_capture"}:
        assert (rows[name].applied, rows[name].ran, rows[name].why_not) == ("by flags", "yes", ""), rows[name]


def test_a_flag_that_vllm_does_not_follow_is_said_and_a_requirement_of_it_fails(seen: Seen) -> None:
    (row,) = [row for row in seen.info.rows if row.pass_name == "parallelism"]
    assert (row.applied, row.ran) == ("by flags", "no")
    assert row.why_not.startswith("--data-parallel-size")
    assert not_running(seen.plan, seen.info.proofs, ["parallelism", "scheduler"]) == {"parallelism": row.why_not}


def test_it_counts_the_prompt_tokens_by_which_replicas_are_told_to_take_turns(seen: Seen) -> None:
    assert seen.prompt_tokens is not None
    assert seen.prompt_tokens > len(PROMPTS)


def test_a_killed_engine_ends_everything_with_exit_code_7(seen: Seen) -> None:
    assert seen.end is not None
    assert str(seen.end).startswith("server ")
    assert seen.end.exit_code is ExitCode.SERVER_FAILED
    assert processes_of(seen.info.run_dir) == []
