"""The arguments that vLLM gets: ours, the user's, and what is planned with both."""

from __future__ import annotations

import dataclasses
import re

import pytest

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.planner import make_plan
from tests.builders import (
    OURS,
    cpu_machine,
    dense_model,
    gpus,
    made_plan,
    mixtral_8x7b,
    qwen3_30b_a3b,
    request,
    tiny_moe,
)
from tests.unit.planner.refusal import refused


def test_the_server_listens_on_this_machine_only_by_default():
    plan = made_plan(tiny_moe(), cpu_machine())
    assert plan.serve_args.words[:4] == ("--host", "127.0.0.1", "--port", "8000")


def test_plain_arguments_are_the_same_server_with_nothing_tuned():
    plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 2), "aggressive", layout="tp2")
    server = ("--host", "127.0.0.1", "--port", "8000", "--shutdown-timeout", "30")
    assert plan.plain_args.words == (*server, "--tensor-parallel-size", "2")


def test_an_argument_of_the_users_replaces_the_planners_and_the_decision_says_so():
    plan = made_plan(tiny_moe(), cpu_machine(), vllm_args=("--max_num_seqs=3", "--seed", "7"))
    assert plan.serve_args.words[-3:] == ("--max_num_seqs=3", "--seed", "7")
    assert [argument.flag for argument in plan.serve_args.arguments].count("--max-num-seqs") == 1
    decision = plan.decision("scheduler")
    assert "--max-num-seqs" not in decision.vllm_args
    assert re.search(r"\(--max-num-seqs .*user\)$", decision.reason)


def test_a_reason_that_names_the_users_argument_does_not_say_it_twice():
    plan = made_plan(qwen3_30b_a3b(), gpus("h200"), vllm_args=("--kv-cache-dtype", "fp8"))
    assert plan.decision("kv_cache").reason.count("--kv-cache-dtype") == 1


def test_the_users_requests_are_what_gains_are_stated_for():
    asked = request(qwen3_30b_a3b(), gpus("h200"), "aggressive", vllm_args=("--max-num-seqs", "8"))
    plan = make_plan(asked)
    assert plan.workload.batch_size == 8
    gain = plan.decision("fp8").gain
    assert gain is not None
    assert "8 sequences at 1536 tokens" in gain.ratio.ref


def test_arguments_that_the_memory_plan_knows_nothing_of_are_named():
    given = ("--kv-cache-memory-bytes", "1G", "--cpu-offload-gb=4", "--no-enable-lora")
    plan = made_plan(qwen3_30b_a3b(), gpus("h200"), vllm_args=given)
    (warning,) = plan.warnings
    assert warning.endswith(": --cpu-offload-gb, --kv-cache-memory-bytes")


def test_the_users_port_replaces_the_planners():
    plan = made_plan(tiny_moe(), cpu_machine(), vllm_args=("--port", "9000"))
    assert plan.serve_args.value("--port") == "9000"


def test_the_users_memory_share_and_length_are_planned_with():
    plan = made_plan(
        qwen3_30b_a3b(),
        gpus("h100_sxm", 1),
        vllm_args=("--gpu-memory-utilization", "0.8", "--max-model-len", "2K"),
    )
    assert plan.memory.budget_bytes == pytest.approx(0.8 * plan.memory.total_bytes, rel=1e-6)
    assert plan.workload.max_model_len == 2048


def test_batch_size_and_length_of_the_request_go_before_the_profile():
    plan = made_plan(tiny_moe(), cpu_machine(), batch_size=5, max_model_len=100)
    assert plan.serve_args.value("--max-num-seqs") == "5"
    assert plan.serve_args.value("--max-model-len") == "100"


def test_a_length_of_the_profile_beyond_the_models_own_is_cut():
    plan = made_plan(tiny_moe(), cpu_machine(), "single_h100")
    assert plan.serve_args.value("--max-model-len") is None
    assert plan.warnings == ()


@pytest.mark.parametrize("asked", [{"max_model_len": 2049}, {"vllm_args": ("--max-model-len", "2049")}])
def test_a_length_beyond_the_models_own_is_refused_unless_vllm_is_told_to_take_it(asked):
    message = "--max-model-len: got 2049, expected at most the 2048 tokens of tiny-moe"
    with pytest.raises(InputError, match=message):
        made_plan(tiny_moe(), cpu_machine(), **asked)
    plan = made_plan(tiny_moe(), cpu_machine(), any_model_len=True, **asked)
    assert plan.serve_args.value("--max-model-len") == "2049"
    assert any(re.search("--max-model-len 2049:.* 2048", warning) for warning in plan.warnings)


@pytest.mark.parametrize(
    "vllm_args",
    [
        ("--max-model-len", "auto"),
        ("--max-model-len=-1",),
        ("--max-model-len", "4K", "--hf-overrides", '{"max_position_embeddings": 4096}'),
    ],
)
def test_a_length_that_vllm_works_out_itself_is_left_to_it(vllm_args):
    plan = made_plan(tiny_moe(), cpu_machine(), vllm_args=vllm_args)
    assert plan.serve_args.words[-len(vllm_args) :] == vllm_args


def test_a_model_without_a_stated_length_takes_any():
    plan = made_plan(qwen3_30b_a3b(max_position=0), gpus("h200"), max_model_len=100_000)
    assert plan.serve_args.value("--max-model-len") == "100000"


@pytest.mark.parametrize("method", ["fp8", "fp8_per_block", "ptpc_fp8"])
def test_vllms_own_fp8_on_the_cpu_is_refused(method):
    with pytest.raises(UnsupportedError, match=f"--quantization {method}:.*CPU build"):
        made_plan(tiny_moe(), cpu_machine(), vllm_args=("--quantization", method))


def test_fp8_by_the_users_own_argument_is_planned_with_half_the_weights():
    plan = made_plan(mixtral_8x7b(), gpus("h100_sxm", 1), vllm_args=("--quantization", "fp8"))
    assert 46e9 < plan.memory.weight_bytes < 48e9


def test_expert_parallelism_of_a_dense_model_is_unsupported():
    dense = request(dense_model(), gpus("h100_sxm", 2), vllm_args=("--enable-expert-parallel",))
    assert "has no experts" in str(refused(dense, UnsupportedError))


def test_the_cpu_build_gets_its_cache_and_dtype():
    plan = made_plan(tiny_moe(), cpu_machine(), dtype="float32", wishes=OURS)
    # 256 sequences of 2048 tokens at 4096 bytes each, in whole GiB.
    assert plan.serve_env == {"VLLM_CPU_KVCACHE_SPACE": "2"}
    assert plan.serve_args.value("--dtype") == "float32"
    assert plan.memory.kv_cache_bytes == 2 * 2**30
    assert "fp32" in plan.decision("flash_dmoe").value


def test_an_fp32_checkpoint_is_served_in_bf16_as_vllm_does():
    plan = made_plan(tiny_moe(dtype="float32"), cpu_machine())
    assert plan.serve_args.value("--dtype") == "bfloat16"


def test_two_processes_with_expert_parallelism_on_the_cpu():
    plan = made_plan(tiny_moe(), cpu_machine(), vllm_args=("--tensor-parallel-size", "2", "--enable-expert-parallel"))
    assert plan.decision("parallelism").value == "TP=2 EP=2"
    assert plan.serve_env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1|2-3"
    assert plan.decision("flash_dmoe").required


def test_expert_parallelism_on_the_cpu_with_experts_our_kernel_cannot_do_is_unsupported():
    biased = dataclasses.replace(tiny_moe(), expert_has_bias=True)
    arguments = ("--tensor-parallel-size", "2", "--enable-expert-parallel")
    error = refused(request(biased, cpu_machine(), vllm_args=arguments), UnsupportedError)
    assert "flash_dmoe is required" in str(error)


@pytest.mark.parametrize("flag", ["--model", "--config", "--uds", "--headless", "--grpc"])
def test_an_argument_that_starts_another_server_than_the_planned_one_is_refused(flag):
    with pytest.raises(InputError, match=f"vllm arguments: {flag}: "):
        made_plan(tiny_moe(), cpu_machine(), vllm_args=(f"{flag}=x",))
