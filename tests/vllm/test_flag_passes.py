"""The passes that flags carry out reach a real server, which says what it runs with. Then its engine is killed."""

from __future__ import annotations

import re

import pytest

from moe_optimizer.errors import ExitCode
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.pass_params import KvCacheParams, SchedulerParams
from moe_optimizer.proof.verdict import not_running
from tests.run_processes import processes_of
from tests.vllm.conftest import PROMPTS
from tests.vllm.flags_and_pruned import MAX_MODEL_LEN, MAX_NUM_SEQS, Seen, flags_and_pruned


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return flags_and_pruned(tmp_path_factory)


def test_the_scheduler_has_the_planned_sizes(seen: Seen) -> None:
    tokens = seen.plan.decision("scheduler").params_as(SchedulerParams).max_num_batched_tokens
    assert f"'max_num_seqs': {MAX_NUM_SEQS}" in seen.arguments
    assert f"'max_num_batched_tokens': {tokens}" in seen.arguments
    assert "'performance_mode': 'interactivity'" in seen.arguments


def test_the_cache_has_the_planned_type_and_holds_the_planned_length(seen: Seen) -> None:
    (labels,) = re.findall(r"^vllm:cache_config_info\{(.*)\}", seen.metrics, re.MULTILINE)
    # FP8 where vLLM's CPU build has it.
    planned = seen.plan.decision("kv_cache").params_as(KvCacheParams)
    assert f'cache_dtype="{planned.dtype}"' in labels
    assert f"'max_model_len': {MAX_MODEL_LEN}" in seen.arguments
    blocks, size = (int(re.findall(rf'{name}="(\d+)"', labels)[0]) for name in ("num_gpu_blocks", "block_size"))
    assert blocks * size >= MAX_MODEL_LEN


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


def test_a_server_that_is_stopped_refuses_new_requests_and_says_how_it_got_on(seen: Seen) -> None:
    assert seen.health_when_marked == (503, True)
    assert seen.traffic.unfinished == 0
    assert seen.traffic.finished >= len(PROMPTS)
    assert "/metrics?heartbeat" not in seen.info.log_path.read_text(encoding="utf-8", errors="replace")


def test_a_request_that_is_given_to_an_engine_that_stands_still_is_unfinished(seen: Seen) -> None:
    assert seen.stopped.unfinished == 1
    # vLLM's own counts say nothing of it.
    assert seen.stopped.progress[0] == 0


def test_a_killed_engine_ends_everything_with_exit_code_7(seen: Seen) -> None:
    (engine,) = [proof.pid for proof in seen.info.proofs if proof.role == "engine"]
    assert f": engine core {engine} " in seen.end
    assert "SIGKILL" in seen.end
    assert seen.exit_code is ExitCode.SERVER_FAILED
    assert processes_of(seen.info.run_dir) == []
