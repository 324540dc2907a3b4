"""What fits which machine: memory, number of GPUs, device."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from moe_optimizer.errors import DoesNotFitError, ExitCode, UnsupportedError
from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.inspection.vllm_runs import read_vllm_runs
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.decision import Status
from moe_optimizer.planner import make_plan
from tests.builders import (
    cpu_machine,
    deepseek_v3,
    gpt_oss_120b,
    gpus,
    made_plan,
    mixtral_8x7b,
    profile_with,
    qwen3_30b_a3b,
    request,
    shaped_model,
    software,
    tiny_moe,
)
from tests.unit.planner.refusal import refused


def gpus_needed(error):
    """How many GPUs the hint asks for, by how the weights are held."""
    return {how: int(number) for number, how in re.findall(r"(?<!up to )\b(\d+) ((?:as|in) \w+)", str(error.hint))}


def test_qwen3_30b_fits_one_h100_in_bf16_and_leaves_what_is_really_left():
    plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 1), "conservative")
    assert plan.memory.fits
    assert 60e9 < plan.memory.weight_bytes < 62e9
    assert 12e9 < plan.memory.kv_cache_bytes < 15e9
    assert plan.num_gpus == 1


def test_mixtral_in_bf16_needs_two_h100():
    error = refused(request(mixtral_8x7b(), gpus("h100_sxm", 1)), DoesNotFitError)
    assert error.exit_code == ExitCode.UNSUPPORTED
    assert re.search("93\\.4 GB.* 77 GB.* 85\\.5 GB", str(error))
    assert gpus_needed(error) == {"as stored": 2, "in BF16": 2, "in FP8": 1}
    assert "--enable-fp8" in str(error.hint)
    assert made_plan(mixtral_8x7b(), gpus("h100_sxm", 2)).num_gpus == 2


def test_deepseek_v3_says_how_many_h100_it_needs_in_fp8_and_bf16():
    error = refused(request(deepseek_v3(), gpus("h100_sxm", 1)), DoesNotFitError)
    assert gpus_needed(error) == {"as stored": 16, "in BF16": 24, "in FP8": 16}
    whole = deepseek_v3(bytes_per_weight=2, dtype="bfloat16")
    assert made_plan(whole, gpus("h100_sxm", 8), num_nodes=3).num_gpus == 24
    refused(request(whole, gpus("h100_sxm", 8), num_nodes=2), DoesNotFitError)


def test_heads_that_no_larger_slices_divide_are_held_by_stages_on_several_machines(tmp_path):
    # 40 heads: no slices over 16 GPUs.
    shutil.copy(Path(__file__).parents[2] / "data" / "model_configs" / "llama4.json", tmp_path / "config.json")
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= {"num_local_experts": 128, "interleave_moe_layer_step": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelInspector().inspect(tmp_path)
    error = refused(request(model, gpus("h100_sxm", 8)), DoesNotFitError)
    assert gpus_needed(error)["as stored"] == 16
    assert str(error.hint).endswith("moe-optimizer plan --nodes 2")
    assert made_plan(model, gpus("h100_sxm", 8), num_nodes=2).num_gpus == 16


def test_deepseek_v3_fits_eight_h200_and_not_four():
    assert made_plan(deepseek_v3(), gpus("h200", 8)).num_gpus == 8
    refused(request(deepseek_v3(), gpus("h200", 4)), DoesNotFitError)


def test_fewer_gpus_than_needed_although_more_are_there_names_the_flag():
    error = refused(request(mixtral_8x7b(), gpus("h100_sxm", 4), num_gpus=1), DoesNotFitError)
    assert str(error.hint).endswith("--gpus 2")


def test_a_profile_that_takes_no_more_gpus_is_named_instead_of_the_flag():
    error = refused(request(mixtral_8x7b(), gpus("h100_sxm", 4), "single_h100", num_gpus=4), DoesNotFitError)
    assert re.search("4 are there,.*single_h100.* 1", str(error.hint))
    assert "--gpus" not in str(error.hint)


def test_a_size_of_the_users_that_is_too_small_is_named_instead_of_the_flag():
    asked = request(
        mixtral_8x7b(), gpus("h100_sxm", 4), vllm_args=("--tensor-parallel-size", "1", "--data-parallel-size", "1")
    )
    error = refused(asked, DoesNotFitError)
    assert str(error.hint).endswith("parallel size of 2")
    assert "--gpus" not in str(error.hint)


def test_what_conversion_makes_of_the_weights_is_not_called_as_stored():
    large = shaped_model(hidden=4096, layers=94, heads=64, width=1536)
    error = refused(request(large, gpus("h100_sxm", 1), "aggressive"), DoesNotFitError)
    assert gpus_needed(error) == {"as planned": 4, "as stored": 8, "in BF16": 8, "in FP8": 4}


def test_four_bits_are_offered_where_they_need_fewer_gpus_and_our_kernels_are_built():
    large, machine = shaped_model(hidden=4096, layers=94, heads=64, width=1536), gpus("h100_sxm", 2)
    built = software(cuda_ops=("fused_experts", "few_rows"))
    error = refused(request(large, machine, software=built), DoesNotFitError)
    assert gpus_needed(error)["in four"] == 2 < gpus_needed(error)["in FP8"]
    assert "--enable-four-bit" in str(error.hint)
    asked = resolve_wishes(["four-bit"], [])
    plan = made_plan(large, machine, software=built, wishes=asked, batch_size=16)
    assert plan.decision("four_bit").status is Status.ON
    assert "four" not in str(refused(request(large, machine, software=software(cuda_ops=())), DoesNotFitError).hint)
    small = refused(request(mixtral_8x7b(), gpus("h100_sxm", 1), software=built), DoesNotFitError)
    assert gpus_needed(small)["in FP8"] == 1
    assert "four" not in str(small.hint)


def test_where_the_requests_take_all_of_a_gpu_the_hint_is_fewer_of_them():
    error = refused(request(qwen3_30b_a3b(), gpus("h100_sxm", 1), batch_size=65536), DoesNotFitError)
    assert re.search("161 GB to work in", str(error))
    assert "a step takes that on every GPU" in str(error.hint)
    assert "--batch-size 65536" in str(error.hint)


def test_copies_that_do_not_fit_are_counted_with_all_their_gpus():
    asked = request(deepseek_v3(), gpus("h100_sxm", 8), vllm_args=("--data-parallel-size", "2"))
    error = refused(asked, DoesNotFitError)
    assert " 8 x NVIDIA H100" in str(error)
    # Two copies share the experts; in 16 bits no machines hold them in one stage, and copies have no more.
    assert gpus_needed(error) == {"as stored": 16, "in FP8": 16}
    assert (
        made_plan(deepseek_v3(), gpus("h100_sxm", 8), num_nodes=2, vllm_args=("--data-parallel-size", "2")).num_gpus
        == 16
    )


def test_a_machine_without_room_for_one_gigabyte_of_cache_does_not_fit():
    here = cpu_machine(gib=1)
    error = refused(request(tiny_moe(), here), DoesNotFitError)
    assert "--hardware" in str(error.hint)
    assert "h200" in str(error.hint)
    named = refused(request(tiny_moe(), dataclasses.replace(here, origin="named")), DoesNotFitError)
    assert "--hardware" not in str(named.hint)
    assert made_plan(tiny_moe(), cpu_machine(gib=4)).memory.fits


def test_a_context_that_the_cache_cannot_hold_is_cut_with_a_warning():
    plan = made_plan(qwen3_30b_a3b(max_position=262144), gpus("h100_sxm", 1))
    length = plan.serve_args.value("--max-model-len")
    assert length is not None
    assert plan.plain_args.value("--max-model-len") == length
    assert any(re.search(f"max-model-len .*{length} .*262144", warning) for warning in plan.warnings)


def test_a_cut_context_that_is_longer_than_what_all_requests_share_is_not_explained_by_that():
    model = qwen3_30b_a3b(max_position=262144, state_bytes_per_sequence=100_000_000)
    plan = make_plan(request(model, gpus("h100_sxm", 1)))
    assert int(plan.serve_args.value("--max-model-len") or 0) > plan.memory.kv_tokens
    (warning,) = [each for each in plan.warnings if each.startswith("max-model-len")]
    assert str(plan.memory.kv_tokens) not in warning


def test_more_gpus_than_there_are_is_reduced_with_a_warning():
    plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 2), num_gpus=8)
    assert plan.num_gpus == 2
    assert any(warning.startswith("--gpus 8: ") for warning in plan.warnings)


def test_single_h100_uses_one_of_many_without_fuss():
    plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 8), "single_h100")
    assert plan.num_gpus == 1
    assert plan.warnings == ()
    assert plan.serve_args.value("--max-model-len") == "32768"


def test_gpus_on_a_machine_without_any_is_a_warning():
    plan = made_plan(tiny_moe(), cpu_machine(), num_gpus=2)
    assert plan.num_gpus == 0
    assert any(warning.startswith("--gpus 2: ") for warning in plan.warnings)


def test_a_gpu_with_the_cpu_build_is_planned_for_the_cpu_and_said():
    machine = dataclasses.replace(gpus("h100_sxm", 1), origin="probed", cpu=cpu_machine().cpu)
    plan = made_plan(tiny_moe(), machine, software=software("cpu"))
    assert plan.num_gpus == 0
    assert any("the CPU build" in warning for warning in plan.warnings)


def test_a_named_machine_is_planned_for_whatever_is_installed_here():
    plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 1), software=software("cpu"))
    assert plan.num_gpus == 1
    assert any("be started here" in warning for warning in plan.warnings)


def test_a_vllm_that_was_not_run_with_this_package_is_a_warning():
    newer = dataclasses.replace(software("cuda", version="0.33.0"), vllm_runs=read_vllm_runs())
    plan = made_plan(qwen3_30b_a3b(), gpus("h200"), software=newer)
    assert any("vLLM 0.33.0" in warning for warning in plan.warnings)


def test_a_cuda_vllm_without_a_gpu_is_unsupported():
    error = refused(request(tiny_moe(), cpu_machine(), software=software("cuda")), UnsupportedError)
    assert "built for CUDA" in str(error)


def test_a_machine_of_which_nothing_is_known_is_unsupported():
    nothing = dataclasses.replace(cpu_machine(), cpu=None)
    assert "neither" in str(refused(request(tiny_moe(), nothing), UnsupportedError))


def test_planning_gpt_oss_on_one_h100():
    plan = made_plan(gpt_oss_120b(), gpus("h100_sxm", 1))
    assert plan.memory.kv_tokens > 100_000


def fp8_on_the_cpu(gib: float, **section):
    profile = profile_with(passes={"fp8": {"mode": "on", **section}})
    return made_plan(qwen3_30b_a3b(), cpu_machine(gib=gib, cores=16), profile)


def test_the_weights_with_every_layer_left_unconverted_are_in_the_plan():
    plan = fp8_on_the_cpu(128)
    assert re.search(r"\(all: 61\.1 GB.* 32\.1 GB\)", plan.decision("fp8").reason)
    assert 32e9 < plan.memory.weight_bytes < 32.2e9


def test_layers_left_unconverted_that_may_not_fit_are_a_warning():
    small = fp8_on_the_cpu(48)
    (warning,) = [each for each in small.warnings if each.startswith("fp8: layers")]
    assert " 29 GB more" in warning
    assert not any("fp8: layers" in each for each in fp8_on_the_cpu(128).warnings)


def test_no_layer_is_left_where_nothing_bounds_its_error():
    plan = fp8_on_the_cpu(48, max_layer_error=None)
    assert "does not count" not in plan.decision("fp8").reason
    assert not any("fp8: layers" in each for each in plan.warnings)


def test_a_model_for_more_than_one_machine_names_the_command_that_plans_for_several():
    error = refused(request(deepseek_v3(), gpus("h100_sxm", 8)), DoesNotFitError)
    assert str(error.hint).endswith("moe-optimizer plan --nodes 2")
    nodes = request(deepseek_v3(), gpus("h100_sxm", 8), num_gpus=16, num_nodes=2)
    assert make_plan(nodes).num_gpus == 16


def test_servers_for_prefill_and_decode_that_no_machine_holds_say_that_they_lie_within_one():
    apart = resolve_wishes(["disaggregation"], [])
    error = refused(
        request(deepseek_v3(), gpus("h100_sxm", 8), num_gpus=16, num_nodes=2, wishes=apart), DoesNotFitError
    )
    assert "--disable-disaggregation" in str(error.hint)
    fits_a_machine = request(deepseek_v3(), gpus("h200", 8), wishes=apart)
    assert "--disable-disaggregation" not in str(refused(fits_a_machine, DoesNotFitError).hint)


@pytest.mark.parametrize("asked", [{"max_model_len": 10}, {"vllm_args": ("--max-model-len", "10")}])
def test_predictions_take_prompts_that_the_longest_sequence_has_room_for_and_say_so(asked):
    plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 2), **asked)
    assert plan.workload.input_tokens + plan.workload.output_tokens == 10
    assert [each for each in plan.warnings if "max-model-len 10 " in each and "1024" in each]


def test_prompts_that_just_fit_are_planned_for_as_they_are():
    plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 2), max_model_len=1536)
    assert (plan.workload.input_tokens, plan.workload.output_tokens) == (1024, 512)
    assert not any("max-model-len" in each for each in plan.warnings)
