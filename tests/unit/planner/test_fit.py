"""What fits which machine: memory, number of GPUs, device."""

from __future__ import annotations

import dataclasses

from moe_optimizer.errors import DoesNotFitError, ExitCode, UnsupportedError
from moe_optimizer.inspection.vllm_runs import read_vllm_runs
from moe_optimizer.planner import make_plan
from tests.builders import (
    cpu_machine,
    deepseek_v3,
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
from tests.unit.planner.refusal import refused


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
    assert "may use 77 GB of 85.5 GB" in str(error)
    assert error.hint == "GPUs of this kind needed: 2 as stored (bfloat16), 2 in BF16, 1 in FP8 (--enable-fp8)"
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


def test_a_profile_that_takes_no_more_gpus_is_named_instead_of_the_flag():
    error = refused(request(mixtral_8x7b(), gpus("h100_sxm", 4), "single_h100", num_gpus=4), DoesNotFitError)
    assert error.hint is not None
    assert error.hint.endswith("4 are there, and profile single_h100 uses at most 1: take another profile")


def test_a_size_of_the_users_that_is_too_small_is_named_instead_of_the_flag():
    asked = request(mixtral_8x7b(), gpus("h100_sxm", 4), vllm_args=("--tensor-parallel-size", "1"))
    error = refused(asked, DoesNotFitError)
    assert error.hint is not None
    assert error.hint.endswith("4 are there: ask for a tensor parallel size of 2")


def test_what_conversion_makes_of_the_weights_is_not_called_as_stored():
    large = shaped_model(hidden=4096, layers=94, heads=64, width=1536)
    error = refused(request(large, gpus("h100_sxm", 1), "aggressive"), DoesNotFitError)
    assert error.hint == "GPUs of this kind needed: 4 as planned, 8 as stored (bfloat16), 8 in BF16, 4 in FP8"


def test_copies_that_do_not_fit_are_counted_with_all_their_gpus():
    asked = request(deepseek_v3(), gpus("h100_sxm", 8), vllm_args=("--data-parallel-size", "2"))
    error = refused(asked, DoesNotFitError)
    assert "does not fit 8 x NVIDIA H100" in str(error)
    assert error.hint == "GPUs of this kind needed: 16 as stored (fp8), 32 in BF16, 16 in FP8"


def test_a_machine_without_room_for_one_gigabyte_of_cache_does_not_fit():
    refused(request(tiny_moe(), cpu_machine(gib=1)), DoesNotFitError)
    assert make_plan(request(tiny_moe(), cpu_machine(gib=4))).memory.fits


def test_a_context_that_the_cache_cannot_hold_is_cut_with_a_warning():
    plan = make_plan(request(qwen3_30b_a3b(max_position=262144), gpus("h100_sxm", 1)))
    length = plan.serve_args.value("--max-model-len")
    assert length is not None
    assert plan.plain_args.value("--max-model-len") == length
    assert any(f"max-model-len is {length} instead of 262144" in warning for warning in plan.warnings)


def test_more_gpus_than_there_are_is_reduced_with_a_warning():
    plan = make_plan(request(qwen3_30b_a3b(), gpus("h100_sxm", 2), num_gpus=8))
    assert plan.num_gpus == 2
    assert "--gpus 8: only 2 there; planning for 2" in plan.warnings


def test_single_h100_uses_one_of_many_without_fuss():
    plan = make_plan(request(qwen3_30b_a3b(), gpus("h100_sxm", 8), "single_h100"))
    assert plan.num_gpus == 1
    assert plan.warnings == ()
    assert plan.serve_args.value("--max-model-len") == "32768"


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


def test_a_vllm_that_was_not_run_with_this_package_is_a_warning():
    newer = dataclasses.replace(software("cuda", version="0.33.0"), vllm_runs=read_vllm_runs())
    plan = make_plan(request(qwen3_30b_a3b(), gpus("h200"), software=newer))
    assert any("has not been run with vLLM 0.33.0" in warning for warning in plan.warnings)


def test_a_cuda_vllm_without_a_gpu_is_unsupported():
    error = refused(request(tiny_moe(), cpu_machine(), software=software("cuda")), UnsupportedError)
    assert "built for CUDA, and this machine has no GPU" in str(error)


def test_a_machine_of_which_nothing_is_known_is_unsupported():
    nothing = dataclasses.replace(cpu_machine(), cpu=None)
    assert "neither" in str(refused(request(tiny_moe(), nothing), UnsupportedError))


def test_planning_gpt_oss_on_one_h100():
    plan = make_plan(request(gpt_oss_120b(), gpus("h100_sxm", 1)))
    assert (
        plan.decision("flash_dmoe").reason
        == "needs unquantised experts, or FP8 ones of the method fp8, found mxfp4, 4 bits"
    )
    assert plan.memory.kv_tokens > 100_000


def fp8_on_the_cpu(gib: float, **section):
    profile = profile_with(passes={"fp8": {"mode": "on", **section}})
    return make_plan(request(qwen3_30b_a3b(), cpu_machine(gib=gib, cores=16), profile))


def test_the_weights_with_every_layer_left_unconverted_are_in_the_plan():
    plan = fp8_on_the_cpu(128)
    assert "stays bfloat16, which the memory plan does not count (all: 61.1 GB of weights instead of 32.1 GB)" in (
        plan.decision("fp8").reason
    )
    assert 32e9 < plan.memory.weight_bytes < 32.2e9


def test_layers_left_unconverted_that_may_not_fit_are_a_warning():
    small = fp8_on_the_cpu(48)
    (warning,) = [each for each in small.warnings if each.startswith("fp8: layers that it changes")]
    assert "all of them would take 29 GB more than planned" in warning
    assert not any("layers that it changes" in each for each in fp8_on_the_cpu(128).warnings)


def test_no_layer_is_left_where_nothing_bounds_its_error():
    plan = fp8_on_the_cpu(48, max_layer_error=None)
    assert "does not count" not in plan.decision("fp8").reason
    assert not any("layers that it changes" in each for each in plan.warnings)


def test_a_model_for_more_than_one_machine_names_the_command_that_plans_for_several():
    error = refused(request(deepseek_v3(), gpus("h100_sxm", 8)), DoesNotFitError)
    assert error.hint is not None
    assert error.hint.endswith("over several machines: moe-optimizer plan --nodes 2")
    nodes = request(deepseek_v3(), gpus("h100_sxm", 8), num_gpus=16, num_nodes=2)
    assert make_plan(nodes).num_gpus == 16
