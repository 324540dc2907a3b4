from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optimizer.errors import (
    DoesNotFitError,
    ExitCode,
    InputError,
    MoeOptimizerError,
    RequiredNotAppliedError,
    UnsupportedError,
)
from moe_optimizer.passes.registry import PASS_NAMES, resolve_wishes, switches
from moe_optimizer.plan.decision import Status, Wish
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import flag_value, split_arguments
from moe_optimizer.planner import PlanRequest, make_plan
from tests.builders import (
    cpu_machine,
    deepseek_v3,
    dense_model,
    gpt_oss_120b,
    gpus,
    mixtral_8x7b,
    profile_with,
    qwen3_30b_a3b,
    request,
    shaped_model,
    software,
    tiny_moe,
)


def refused(plan_request: PlanRequest, error: type[MoeOptimizerError] = InputError) -> MoeOptimizerError:
    with pytest.raises(error) as caught:
        make_plan(plan_request)
    return caught.value


# Fit


def test_qwen3_30b_fits_one_h100_in_bf16_and_leaves_what_is_really_left():
    plan = make_plan(request(qwen3_30b_a3b(), gpus("h100_sxm", 1), "conservative"))
    assert plan.memory.fits
    assert 60e9 < plan.memory.weight_bytes < 62e9
    assert 12e9 < plan.memory.kv_cache_bytes < 15e9
    assert plan.num_gpus == 1


def test_mixtral_in_bf16_needs_two_h100():
    error = refused(request(mixtral_8x7b(), gpus("h100_sxm", 1)), DoesNotFitError)
    assert error.exit_code == ExitCode.UNSUPPORTED
    assert "each needs 93.4 GB of weights" in str(error)
    assert "may use 77.0 GB of 85.5 GB" in str(error)
    assert error.hint == "GPUs of this kind needed: 2 as stored (bfloat16), 2 in BF16, 1 in FP8"
    assert make_plan(request(mixtral_8x7b(), gpus("h100_sxm", 2))).num_gpus == 2


def test_deepseek_v3_says_how_many_h100_it_needs_in_fp8_and_bf16():
    error = refused(request(deepseek_v3(), gpus("h100_sxm", 1)), DoesNotFitError)
    assert error.hint == "GPUs of this kind needed: 16 as stored (fp8), 32 in BF16, 16 in FP8"


def test_deepseek_v3_fits_eight_h200_and_not_four():
    assert make_plan(request(deepseek_v3(), gpus("h200", 8))).num_gpus == 8
    refused(request(deepseek_v3(), gpus("h200", 4)), DoesNotFitError)


def test_fewer_gpus_than_needed_although_more_are_there_names_the_flag():
    error = refused(request(mixtral_8x7b(), gpus("h100_sxm", 4), num_gpus=1), DoesNotFitError)
    assert error.hint is not None
    assert error.hint.endswith("4 are there: use --gpus 2")


def test_a_machine_without_room_for_one_gigabyte_of_cache_does_not_fit():
    refused(request(tiny_moe(), cpu_machine(gib=1)), DoesNotFitError)
    assert make_plan(request(tiny_moe(), cpu_machine(gib=4))).memory.fits


def test_a_context_that_the_cache_cannot_hold_is_cut_with_a_warning():
    plan = make_plan(request(qwen3_30b_a3b(max_position=262144), gpus("h100_sxm", 1)))
    length = flag_value(plan.serve_args, "--max-model-len")
    assert length is not None
    assert flag_value(plan.plain_args, "--max-model-len") == length
    assert any(f"max-model-len is {length} instead of 262144" in warning for warning in plan.warnings)


# GPUs and device


def test_more_gpus_than_there_are_is_reduced_with_a_warning():
    plan = make_plan(request(qwen3_30b_a3b(), gpus("h100_sxm", 2), num_gpus=8))
    assert plan.num_gpus == 2
    assert "--gpus 8: only 2 there; planning for 2" in plan.warnings


def test_single_h100_uses_one_of_many_without_fuss():
    plan = make_plan(request(qwen3_30b_a3b(), gpus("h100_sxm", 8), "single_h100"))
    assert plan.num_gpus == 1
    assert plan.warnings == ()
    assert flag_value(plan.serve_args, "--max-model-len") == "32768"


def test_gpus_on_a_machine_without_any_is_a_warning():
    plan = make_plan(request(tiny_moe(), cpu_machine(), num_gpus=2))
    assert plan.num_gpus == 0
    assert "--gpus 2: there is no GPU; planning for the CPU" in plan.warnings


def test_a_gpu_with_the_cpu_build_is_planned_for_the_cpu_and_said():
    machine = dataclasses.replace(gpus("h100_sxm", 1), origin="probed", cpu=cpu_machine().cpu)
    plan = make_plan(request(tiny_moe(), machine, software=software("cpu")))
    assert plan.num_gpus == 0
    assert any("the installed vLLM is the CPU build; planning for the CPU" in warning for warning in plan.warnings)


def test_a_named_machine_is_planned_for_whatever_is_installed_here():
    plan = make_plan(request(qwen3_30b_a3b(), gpus("h100_sxm", 1), software=software("cpu")))
    assert plan.num_gpus == 1
    assert any("cannot be started here" in warning for warning in plan.warnings)


def test_a_cuda_vllm_without_a_gpu_is_unsupported():
    error = refused(request(tiny_moe(), cpu_machine(), software=software("cuda")), UnsupportedError)
    assert "built for CUDA, and this machine has no GPU" in str(error)


def test_a_machine_of_which_nothing_is_known_is_unsupported():
    nothing = dataclasses.replace(cpu_machine(), cpu=None)
    assert "neither" in str(refused(request(tiny_moe(), nothing), UnsupportedError))


# Arguments


def test_the_server_listens_on_this_machine_only_by_default():
    plan = make_plan(request(tiny_moe(), cpu_machine()))
    assert plan.serve_args[:4] == ("--host", "127.0.0.1", "--port", "8000")


def test_plain_arguments_are_the_same_server_with_nothing_tuned():
    plan = make_plan(request(qwen3_30b_a3b(), gpus("h100_sxm", 2), "aggressive"))
    server = ("--host", "127.0.0.1", "--port", "8000", "--shutdown-timeout", "30")
    assert plan.plain_args == (*server, "--tensor-parallel-size", "2")


def test_an_argument_of_the_users_replaces_the_planners_and_the_decision_says_so():
    plan = make_plan(request(tiny_moe(), cpu_machine(), vllm_args=("--max_num_seqs=3", "--seed", "7")))
    assert plan.serve_args[-3:] == ("--max_num_seqs=3", "--seed", "7")
    assert [argument.flag for argument in split_arguments(plan.serve_args)].count("--max-num-seqs") == 1
    decision = plan.decision("scheduler")
    assert "--max-num-seqs" not in decision.vllm_args
    assert decision.reason.endswith("(--max-num-seqs given by the user)")


def test_the_users_port_replaces_the_planners():
    plan = make_plan(request(tiny_moe(), cpu_machine(), vllm_args=("--port", "9000")))
    assert flag_value(plan.serve_args, "--port") == "9000"


def test_the_users_memory_share_and_length_are_planned_with():
    plan = make_plan(
        request(
            qwen3_30b_a3b(),
            gpus("h100_sxm", 1),
            vllm_args=("--gpu-memory-utilization", "0.8", "--max-model-len", "2K"),
        )
    )
    assert plan.memory.budget_bytes == pytest.approx(0.8 * plan.memory.total_bytes, rel=1e-6)
    assert plan.workload.max_model_len == 2048


def test_batch_size_and_length_of_the_request_go_before_the_profile():
    plan = make_plan(request(tiny_moe(), cpu_machine(), batch_size=5, max_model_len=100))
    assert flag_value(plan.serve_args, "--max-num-seqs") == "5"
    assert flag_value(plan.serve_args, "--max-model-len") == "100"


def test_a_length_of_the_profile_beyond_the_models_own_is_cut():
    plan = make_plan(request(tiny_moe(), cpu_machine(), "single_h100"))
    assert flag_value(plan.serve_args, "--max-model-len") is None
    assert plan.warnings == ()


@pytest.mark.parametrize("asked", [{"max_model_len": 2049}, {"vllm_args": ("--max-model-len", "2049")}])
def test_a_length_beyond_the_models_own_is_refused_unless_vllm_is_told_to_take_it(asked):
    message = "--max-model-len: got 2049, expected at most the 2048 tokens of tiny-moe"
    with pytest.raises(InputError, match=message):
        make_plan(request(tiny_moe(), cpu_machine(), **asked))
    plan = make_plan(request(tiny_moe(), cpu_machine(), any_model_len=True, **asked))
    assert flag_value(plan.serve_args, "--max-model-len") == "2049"
    assert any("--max-model-len 2049: the model was made for 2048" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    "vllm_args",
    [
        ("--max-model-len", "auto"),
        ("--max-model-len=-1",),
        ("--max-model-len", "4K", "--hf-overrides", '{"max_position_embeddings": 4096}'),
    ],
)
def test_a_length_that_vllm_works_out_itself_is_left_to_it(vllm_args):
    assert make_plan(request(tiny_moe(), cpu_machine(), vllm_args=vllm_args)).serve_args[-len(vllm_args) :] == vllm_args


def test_a_model_without_a_stated_length_takes_any():
    plan = make_plan(request(qwen3_30b_a3b(max_position=0), gpus("h200"), max_model_len=100_000))
    assert flag_value(plan.serve_args, "--max-model-len") == "100000"


@pytest.mark.parametrize("method", ["fp8", "fp8_per_block", "ptpc_fp8"])
def test_vllms_own_fp8_on_the_cpu_is_refused(method):
    with pytest.raises(UnsupportedError, match=f"--quantization {method}: vLLM's CPU build has no FP8 kernels"):
        make_plan(request(tiny_moe(), cpu_machine(), vllm_args=("--quantization", method)))


def test_fp8_by_the_users_own_argument_is_planned_with_half_the_weights():
    plan = make_plan(request(mixtral_8x7b(), gpus("h100_sxm", 1), vllm_args=("--quantization", "fp8")))
    assert 46e9 < plan.memory.weight_bytes < 48e9


def test_expert_parallelism_of_a_dense_model_is_unsupported():
    dense = request(dense_model(), gpus("h100_sxm", 2), vllm_args=("--enable-expert-parallel",))
    assert "has no experts" in str(refused(dense, UnsupportedError))


def test_the_cpu_build_gets_its_cache_and_dtype():
    plan = make_plan(request(tiny_moe(), cpu_machine(), dtype="float32"))
    # 256 sequences of 2048 tokens at 4096 bytes each, in whole GiB.
    assert plan.serve_env == {"VLLM_CPU_KVCACHE_SPACE": "2"}
    assert flag_value(plan.serve_args, "--dtype") == "float32"
    assert plan.memory.kv_cache_bytes == 2 * 2**30
    assert plan.decision("flash_dmoe").value == "cpu kernel, fp32 weights"


def test_an_fp32_checkpoint_is_served_in_bf16_as_vllm_does():
    plan = make_plan(request(tiny_moe(dtype="float32"), cpu_machine()))
    assert flag_value(plan.serve_args, "--dtype") == "bfloat16"


def test_two_processes_with_expert_parallelism_on_the_cpu():
    plan = make_plan(
        request(tiny_moe(), cpu_machine(), vllm_args=("--tensor-parallel-size", "2", "--enable-expert-parallel"))
    )
    assert plan.decision("parallelism").value == "TP=2 EP=2"
    assert plan.serve_env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1|2-3"
    assert plan.decision("flash_dmoe").required


def test_expert_parallelism_on_the_cpu_with_experts_our_kernel_cannot_do_is_unsupported():
    biased = dataclasses.replace(tiny_moe(), expert_has_bias=True)
    arguments = ("--tensor-parallel-size", "2", "--enable-expert-parallel")
    error = refused(request(biased, cpu_machine(), vllm_args=arguments), UnsupportedError)
    assert "flash_dmoe is required" in str(error)


# Wishes


def test_a_required_pass_that_is_not_on_makes_no_plan():
    error = refused(request(qwen3_30b_a3b(), gpus("a100_80gb"), required=frozenset({"fp8"})), RequiredNotAppliedError)
    assert error.exit_code is ExitCode.NOT_APPLIED
    assert str(error).startswith("fp8 is required (flag --require fp8) and refused: needs FP8 matrix units")
    assert error.hint is not None


@pytest.mark.parametrize(
    ("model", "machine"),
    [(tiny_moe, cpu_machine()), (qwen3_30b_a3b, gpus("h100_sxm")), (qwen3_30b_a3b, gpus("h100_sxm", 8))],
    ids=["CPU", "one GPU", "eight GPUs"],
)
def test_any_two_flags_end_in_a_plan_or_in_a_sentence(model, machine):
    for one, other in itertools.product(switches(), repeat=2):
        for enabled, disabled in (([one, other], []), ([one], [other]), ([], [one, other])):
            try:
                wishes = resolve_wishes([switch.flag for switch in enabled], [switch.flag for switch in disabled])
                plan = make_plan(request(model(), machine, wishes=wishes))
            except MoeOptimizerError:
                continue
            off = [switch.key for switch in disabled if switch.key == switch.pass_name]
            assert all(plan.decision(name).status is Status.OFF for name in off), (enabled, disabled)


WHERE_NOT = {
    "disaggregation": (qwen3_30b_a3b, gpus("h100_sxm")),
    "parallelism": (qwen3_30b_a3b, gpus("h100_sxm")),
    "expert-parallel": (qwen3_30b_a3b, gpus("h100_sxm")),
    "fp8": (qwen3_30b_a3b, gpus("a100_80gb")),
    "sparsity": (qwen3_30b_a3b, gpus("h100_sxm")),
    "flash-dmoe": (qwen3_30b_a3b, gpus("a100_80gb")),
    "expert-load": (dense_model, gpus("h100_sxm")),
    "expert-placement": (qwen3_30b_a3b, gpus("h100_sxm")),
    "tuned-configs": (tiny_moe, cpu_machine()),
    "graph-capture": (tiny_moe, cpu_machine()),
    "kv-cache": (deepseek_v3, gpus("h200", 8)),
    "kv-tiering": (tiny_moe, cpu_machine()),
    "dual-batch-overlap": (qwen3_30b_a3b, gpus("h100_sxm", 8)),
}
"""Where each switch cannot be carried out; the scheduler's always can."""


def test_every_switch_but_the_schedulers_has_a_place_where_it_cannot_be():
    assert WHERE_NOT.keys() | {"scheduler"} == {switch.flag for switch in switches()}


@pytest.mark.parametrize("flag", WHERE_NOT)
def test_whatever_is_required_and_cannot_be_makes_no_plan(flag):
    model, machine = WHERE_NOT[flag]
    assert refused(request(model(), machine, required=frozenset({flag})), RequiredNotAppliedError).exit_code == 6


def test_a_required_pass_that_is_on_is_marked():
    plan = make_plan(request(tiny_moe(), cpu_machine(), required=frozenset({"flash_dmoe"})))
    decision = plan.decision("flash_dmoe")
    assert decision.required
    assert decision.wish_origin == "flag --require flash_dmoe"


def test_everything_off_leaves_a_stock_server():
    off = dict.fromkeys(PASS_NAMES, (Wish.OFF, "environment MOE_OPTIMIZER_DISABLE"))
    plan = make_plan(request(tiny_moe(), cpu_machine(), wishes=off))
    assert plan.serve_args == plan.plain_args
    assert {decision.status for decision in plan.decisions} == {Status.OFF}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"required": frozenset({"fp8"}), "wishes": resolve_wishes([], ["fp8"])},
            ("fp8 is required", "--disable-fp8"),
        ),
        (
            {
                "profile": profile_with(passes={"fp8": {"required": True, "mode": "on"}}),
                "wishes": resolve_wishes([], ["fp8"]),
            },
            ("profile balanced requires fp8", "--disable-fp8"),
        ),
        (
            {"profile": profile_with(passes={"fp8": {"required": True, "mode": "off"}})},
            ("profile balanced requires fp8", "profile balanced switches it off"),
        ),
        (
            {"wishes": resolve_wishes(["graph-capture"], []), "vllm_args": ("--enforce-eager",)},
            ("--enable-graph-capture", "--enforce-eager"),
        ),
        (
            {"wishes": resolve_wishes([], ["kv-cache"]), "vllm_args": ("--kv-cache-dtype", "fp8")},
            ("--disable-kv-cache", "--kv-cache-dtype"),
        ),
        (
            {"wishes": resolve_wishes([], ["expert-parallel"]), "vllm_args": ("--enable-expert-parallel",)},
            ("--disable-expert-parallel", "--enable-expert-parallel"),
        ),
        ({"num_gpus": 0}, ("--gpus: got 0",)),
        ({"batch_size": -1}, ("--batch-size: got -1",)),
        ({"max_model_len": 0}, ("--max-model-len: got 0",)),
        ({"host": " "}, ("--host: got ' '",)),
        ({"port": 65536}, ("--port: got 65536",)),
        ({"dtype": "int4"}, ("--dtype: got 'int4'", "bfloat16")),
        ({"vllm_args": ("--max-num-seqs", "many")}, ("--max-num-seqs: got 'many'",)),
        ({"vllm_args": ("--gpu-memory-utilization", "2")}, ("--gpu-memory-utilization: got '2'",)),
        ({"vllm_args": ("stray",)}, ("got 'stray'",)),
    ],
)
def test_wrong_or_contradicting_input_names_what_was_given(changes, words):
    message = str(refused(request(qwen3_30b_a3b(), gpus("h100_sxm"), **changes)))
    assert all(word in message for word in words), message


# Models


def test_a_model_that_vllm_does_not_have_is_unsupported():
    model = tiny_moe(servable=False, servable_reason="vLLM 0.32.0 has no FooForCausalLM")
    assert "has no FooForCausalLM" in str(refused(request(model, cpu_machine()), UnsupportedError))


def test_code_from_the_model_needs_a_flag():
    model = tiny_moe(needs_remote_code=True)
    error = refused(request(model, cpu_machine()), UnsupportedError)
    assert "--trust-remote-code" in str(error.hint)
    plan = make_plan(request(model, cpu_machine(), trust_remote_code=True))
    assert "--trust-remote-code" in plan.serve_args
    assert "--trust-remote-code" in plan.plain_args


def test_a_dense_model_is_planned_and_said_to_have_no_experts():
    plan = make_plan(request(dense_model(), gpus("l4", 1)))
    assert any("the model has no experts" in warning for warning in plan.warnings)


def test_another_engine_is_not_available():
    assert "embedded" in str(refused(request(tiny_moe(), cpu_machine(), engine="embedded"), UnsupportedError))


# Any model on any machine

MODELS = st.builds(
    shaped_model,
    hidden=st.sampled_from([64, 1024, 2048, 7168]),
    layers=st.integers(1, 64),
    heads=st.sampled_from([1, 4, 6, 12, 24, 40, 64]),
    kv_heads=st.sampled_from([1, 2, 3, 4, 8]),
    head_dim=st.sampled_from([64, 128]),
    vocab=st.integers(100, 200_000),
    experts=st.sampled_from([0, 2, 8, 60, 128, 256]),
    top_k=st.integers(1, 2),
    width=st.sampled_from([64, 96, 768, 1408, 14336]),
    shared=st.integers(0, 2),
    kind=st.sampled_from(["gqa", "mla"]),
    max_position=st.sampled_from([0, 1, 2048, 40960, 10_000_000]),
    quant_method=st.sampled_from([None, "fp8", "mxfp4"]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    state_bytes_per_sequence=st.sampled_from([0, 50_000_000]),
)
MACHINES = st.one_of(
    st.builds(gpus, st.sampled_from(["h100_sxm", "l4", "a100_40gb", "b200"]), st.integers(1, 8)),
    st.builds(cpu_machine, cores=st.integers(1, 64), gib=st.sampled_from([0.5, 4, 64, 2048])),
)


@settings(max_examples=300, deadline=None)
@given(
    model=MODELS,
    machine=MACHINES,
    profile=st.sampled_from(["conservative", "balanced", "aggressive", "single_h100"]),
    batch=st.one_of(st.none(), st.integers(1, 5000)),
    length=st.one_of(st.none(), st.integers(1, 2_000_000)),
    enabled=st.sets(st.sampled_from(["expert-parallel", "kv-cache", "kv-tiering", "fp8", "graph-capture"])),
)
def test_any_model_on_any_machine_gives_a_whole_plan_or_does_not_fit(model, machine, profile, batch, length, enabled):
    try:
        plan = make_plan(  # make_plan verifies what it returns
            request(
                model,
                machine,
                profile,
                batch_size=batch,
                max_model_len=length,
                any_model_len=True,
                wishes=resolve_wishes(sorted(enabled), []),
            )
        )
    except UnsupportedError:
        return
    assert plan.memory.fits
    assert Plan.from_json(plan.to_json(), origin="plan") == plan


def test_planning_gpt_oss_on_one_h100():
    plan = make_plan(request(gpt_oss_120b(), gpus("h100_sxm", 1)))
    assert plan.decision("flash_dmoe").reason == "needs BF16 or FP8 expert weights, found mxfp4"
    assert plan.memory.kv_tokens > 100_000


@pytest.mark.parametrize("flag", ["--model", "--config", "--uds", "--headless", "--grpc"])
def test_an_argument_that_starts_another_server_than_the_planned_one_is_refused(flag):
    with pytest.raises(InputError, match=f"vllm arguments: {flag}: "):
        make_plan(request(tiny_moe(), cpu_machine(), vllm_args=(f"{flag}=x",)))


@pytest.mark.parametrize(
    ("flag", "argument"),
    [
        ("--disable-kv-tiering", "--kv-offloading-size 4"),
        ("--disable-dual-batch-overlap", "--enable-dbo"),
        ("--enable-dual-batch-overlap", "--no-enable-dbo"),
        ("--disable-expert-placement", "--enable-eplb"),
        ("--enable-expert-placement", "--no-enable-eplb"),
        ("--disable-parallelism", "--data-parallel-size 2"),
        ("--enable-expert-parallel", "--no-enable-expert-parallel"),
        ("--enable-expert-load", "--enable-return-routed-experts"),
        ("--enable-flash-dmoe", "--moe-backend flashinfer_cutlass"),
        ("--disable-fp8", "--quantization fp8"),
        ("--enable-fp8", "--quantization gptq"),
        ("--enable-sparsity", "--quantization fp8"),
        ("--enable-disaggregation", "--kv-transfer-config {}"),
    ],
)
def test_a_flag_and_an_argument_of_vllm_that_contradict_each_other_are_both_named(flag, argument):
    kind, _, name = flag.removeprefix("--").partition("-")
    wishes = resolve_wishes([name], []) if kind == "enable" else resolve_wishes([], [name])
    with pytest.raises(InputError, match=re.escape(f"{flag} and {argument} after -- contradict each other")):
        make_plan(request(qwen3_30b_a3b(), gpus("h200", 8), wishes=wishes, vllm_args=tuple(argument.split())))


@pytest.mark.parametrize(
    ("flag", "argument"),
    [
        ("flash-dmoe", "--moe-backend triton"),
        ("expert-parallel", "--enable-expert-parallel"),
        ("dual-batch-overlap", "--enable-dbo"),
        ("graph-capture", "--no-enforce-eager"),
    ],
)
def test_a_flag_and_an_argument_that_say_the_same_are_taken(flag, argument):
    wishes = resolve_wishes([flag], [])
    assert make_plan(request(qwen3_30b_a3b(), gpus("h200", 8), wishes=wishes, vllm_args=tuple(argument.split())))


def test_the_kill_switch_leaves_the_users_own_arguments():
    off = dict.fromkeys([*PASS_NAMES, "kv_cache.tiering"], (Wish.OFF, "environment MOE_OPTIMIZER_DISABLE"))
    arguments = ("--kv-cache-dtype", "fp8", "--kv-offloading-size", "4")
    plan = make_plan(request(qwen3_30b_a3b(), gpus("h200", 1), wishes=off, vllm_args=arguments))
    assert plan.serve_args[-4:] == arguments


@pytest.mark.parametrize(
    ("required", "machine", "words"),
    [
        ("kv-tiering", cpu_machine(), "tiering of kv_cache is required and off: vLLM moves cache blocks"),
        ("expert-parallel", gpus("h200", 1), "expert_parallel of parallelism is required and off: one GPU"),
    ],
)
def test_a_required_setting_that_cannot_be_makes_no_plan(required, machine, words):
    model = tiny_moe() if machine.gpu is None else qwen3_30b_a3b()
    error = refused(request(model, machine, required=frozenset({required})), RequiredNotAppliedError)
    assert str(error).startswith(words)


def test_a_required_setting_is_switched_on():
    plan = make_plan(request(qwen3_30b_a3b(), gpus("h200", 2), required=frozenset({"kv-tiering", "expert-parallel"})))
    assert flag_value(plan.serve_args, "--kv-offloading-size") is not None
    assert "--enable-expert-parallel" in plan.serve_args
