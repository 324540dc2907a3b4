from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.plan.decision import Decision, Status, Wish
from moe_optimizer.plan.pass_params import ParallelismParams
from tests.builders import (
    context,
    cpu_machine,
    decided_by,
    deepseek_v3,
    dense_model,
    gpus,
    profile_with,
    qwen3_30b_a3b,
    qwen3_30b_a3b_fp8,
    shaped_model,
    software,
    tiny_moe,
)


def decide(model, hardware, **changes) -> Decision:
    return decided_by(context(model, hardware, **changes), "parallelism").decided["parallelism"]


def split(decision: Decision) -> tuple[int, int, bool]:
    params = decision.params_as(ParallelismParams)
    return params.tensor_parallel_size, params.data_parallel_size, params.expert_parallel


def test_one_gpu_needs_no_flag():
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm", 1))
    assert decision.status is Status.OFF
    assert decision.vllm_args.words == ()
    assert "one GPU" in decision.reason


@pytest.mark.parametrize("count", [2, 4, 8])
def test_all_gpus_are_used_where_the_heads_divide(count):
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm", count))
    assert decision.vllm_args.words == ("--tensor-parallel-size", str(count))
    assert f" {count} slices" in decision.reason


def test_the_largest_divisor_of_the_heads_is_taken_and_the_rest_named():
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm", 6))
    assert split(decision) == (4, 1, False)
    assert "32 attention heads" in decision.rejected["TP=6"]
    assert decision.warnings[0].startswith("2 of 6 GPUs ")


def test_whole_experts_where_a_slice_is_not_a_whole_fp8_block():
    decision = decide(qwen3_30b_a3b_fp8(), gpus("h100_sxm", 4))
    assert split(decision) == (4, 1, True)
    assert "--enable-expert-parallel" in decision.vllm_args
    assert "768 / 4 " in decision.reason
    assert re.search("4 GPUs.*32 whole experts", decision.reason)


@pytest.mark.parametrize(("block", "expert_parallel"), [(None, False), ((64, 64), False), ((128, 128), True)])
def test_only_scales_per_block_ask_for_whole_blocks_in_whatever_files(block, expert_parallel):
    stored = dataclasses.replace(qwen3_30b_a3b_fp8(), quant_method="compressed-tensors", weight_block=block)
    assert split(decide(stored, gpus("h100_sxm", 4))) == (4, 1, expert_parallel)


def test_deepseek_slices_divide_into_fp8_blocks():
    assert split(decide(deepseek_v3(), gpus("h200", 8))) == (8, 1, False)


def test_expert_parallel_is_on_when_a_flag_asks_for_it():
    wishes = {"parallelism.expert_parallel": (Wish.ON, "flag --enable-expert-parallel")}
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm", 8), wishes=wishes)
    assert split(decision) == (8, 1, True)
    assert "flag --enable-expert-parallel" in decision.reason


@pytest.mark.parametrize(
    ("model", "why"),
    [(shaped_model(experts=100), "100 experts "), (dense_model(), "the model has ")],
)
def test_expert_parallel_that_cannot_be_is_refused_aloud(model, why):
    wishes = {"parallelism.expert_parallel": (Wish.ON, "flag --enable-expert-parallel")}
    decision = decide(model, gpus("h100_sxm", 8), wishes=wishes)
    assert not decision.params_as(ParallelismParams).expert_parallel
    (warning,) = decision.warnings
    assert warning.startswith("expert parallelism refused ")
    assert warning.partition("(flag --enable-expert-parallel): ")[2].startswith(why)


def test_expert_parallel_on_one_gpu_is_refused_aloud():
    wishes = {"parallelism.expert_parallel": (Wish.ON, "flag --enable-expert-parallel")}
    assert "one device" in decide(qwen3_30b_a3b(), gpus("h100_sxm", 1), wishes=wishes).warnings[0]


def test_data_parallel_from_the_profile_shares_one_set_of_experts():
    profile = profile_with(passes={"parallelism": {"data_parallel_size": 2}})
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm", 8), profile=profile)
    assert split(decision) == (4, 2, True)
    assert decision.vllm_args.words == (
        *("--tensor-parallel-size", "4"),
        *("--data-parallel-size", "2"),
        "--enable-expert-parallel",
    )


def test_copies_without_expert_parallelism_share_slices_of_the_experts():
    profile = profile_with(passes={"parallelism": {"data_parallel_size": 2, "expert_parallel": "off"}})
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm", 8), profile=profile)
    assert split(decision) == (4, 2, False)
    attention, copies, experts = decision.reason.split("; ")
    assert "attention" in attention
    assert " 4 slices" in attention
    assert copies.startswith("2 copies ")
    assert "expert " in experts
    assert " 8 slices" in experts


def test_copies_are_refused_where_their_slices_of_the_experts_would_be_no_whole_blocks():
    # 768 / 2 are three FP8 blocks of 128, 768 / 4 are not.
    asked = {"tensor_parallel_size": 2, "data_parallel_size": 2, "expert_parallel": "off"}
    profile = profile_with(passes={"parallelism": asked})
    with pytest.raises(UnsupportedError, match=r"768 / 4.*128,.*whole experts"):
        decide(qwen3_30b_a3b_fp8(), gpus("h100_sxm", 4), software=WHOLE_BLOCKS_ONLY, profile=profile)


def test_copies_of_a_dense_model_are_whole():
    decision = decide(dense_model(), gpus("h100_sxm", 2), pinned={"--data-parallel-size": "2"})
    assert "2 copies of " in decision.reason


OFF = {"parallelism.expert_parallel": (Wish.OFF, "flag --disable-expert-parallel")}


WHOLE_BLOCKS_ONLY = software(version="0.28.1")


@pytest.mark.parametrize("off", [{"wishes": OFF}, {"pinned": {"--enable-expert-parallel": "false"}}])
def test_experts_that_may_not_be_whole_on_a_gpu_are_cut_into_fewer_slices(off):
    # Before 0.29 vLLM did not start with slices of 192: no whole FP8 blocks of 128.
    decision = decide(qwen3_30b_a3b_fp8(), gpus("h100_sxm", 4), software=WHOLE_BLOCKS_ONLY, **off)
    assert split(decision) == (2, 1, False)
    assert "--enable-expert-parallel" not in decision.vllm_args
    assert "-expert-parallel" in decision.rejected["EP"]
    assert "2 of 4 GPUs " in decision.warnings[0]


def test_experts_that_may_not_be_whole_refuse_a_size_that_cannot_slice_them():
    pinned = {"--tensor-parallel-size": "4", "--enable-expert-parallel": "false"}
    with pytest.raises(UnsupportedError, match="by --no-enable-expert-parallel after --"):
        decide(qwen3_30b_a3b_fp8(), gpus("h100_sxm", 4), software=WHOLE_BLOCKS_ONLY, pinned=pinned)


@pytest.mark.parametrize(("method", "size"), [("fp8", 4), ("compressed-tensors", 2)])
def test_experts_that_may_not_be_whole_are_cut_where_vllm_divides_their_blocks(method, size):
    # 0.29 and later cut slices of 192 with blocks of 64, in the files of one method.
    stored = dataclasses.replace(qwen3_30b_a3b_fp8(), quant_method=method)
    decision = decide(stored, gpus("h100_sxm", 4), software=software(version="0.29.0"), wishes=OFF)
    assert split(decision) == (size, 1, False)


def test_gpus_that_switched_off_parallelism_leaves_unused_are_named():
    wishes = {"parallelism": (Wish.OFF, "flag --disable-parallelism")}
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm", 8), wishes=wishes)
    (warning,) = decision.warnings
    assert re.match("7 of 8 .*flag --disable-parallelism", warning)
    with pytest.raises(InputError, match=r"--nodes 2:.*flag --disable-parallelism"):
        decide(qwen3_30b_a3b(), gpus("h100_sxm", 8), wishes=wishes, num_nodes=2)


def test_the_users_own_size_goes_before_the_profile():
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm", 8), pinned={"--tensor-parallel-size": "2"})
    assert split(decision) == (2, 1, False)
    (warning,) = decision.warnings
    assert re.match("6 of 8 GPUs.*TP=2", warning)


@pytest.mark.parametrize(
    ("pinned", "error", "message"),
    [
        ({"--tensor-parallel-size": "16"}, UnsupportedError, "16 devices, .* 8 GPUs"),
        ({"--tensor-parallel-size": "3"}, UnsupportedError, "32 attention.* 3$"),
        ({"--tensor-parallel-size": "two"}, InputError, "got 'two'"),
        ({"--tensor-parallel-size": "0"}, InputError, "expected at least 1"),
        ({"--data-parallel-size": "9"}, UnsupportedError, "got 9 devices"),
    ],
)
def test_an_impossible_size_of_the_users_names_the_reason(pinned, error, message):
    with pytest.raises(error, match=message):
        decide(qwen3_30b_a3b(), gpus("h100_sxm", 8), pinned=pinned)


def test_processes_of_the_cpu_build_get_cores_of_their_own():
    decision = decide(tiny_moe(), cpu_machine(cores=5), pinned={"--tensor-parallel-size": "2"})
    assert decision.env == {"VLLM_CPU_OMP_THREADS_BIND": "0-2|3-4"}
    decision = decide(tiny_moe(), cpu_machine(cores=2), pinned={"--tensor-parallel-size": "2"})
    assert decision.env == {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def test_workers_are_bound_to_cores_that_the_process_may_use():
    machine = cpu_machine(cores=5, core_ids=(4, 5, 6, 9, 12))
    decision = decide(tiny_moe(), machine, pinned={"--tensor-parallel-size": "2"})
    assert decision.env == {"VLLM_CPU_OMP_THREADS_BIND": "4-6|9,12"}


def test_more_processes_than_cores_are_refused():
    with pytest.raises(UnsupportedError, match=" 2 CPU cores"):
        decide(tiny_moe(), cpu_machine(cores=2), pinned={"--tensor-parallel-size": "4"})


def test_the_users_own_expert_parallelism_is_left_to_vllm_where_it_copes():
    decision = decide(shaped_model(experts=100), gpus("h100_sxm", 8), pinned={"--enable-expert-parallel": ""})
    assert decision.params_as(ParallelismParams).expert_parallel
    assert "13 whole experts" in decision.reason


EP_ON_TWO = {"--tensor-parallel-size": "2", "--enable-expert-parallel": ""}


def test_expert_parallel_on_the_cpu_uses_our_kernel():
    assert split(decide(tiny_moe(), cpu_machine(), pinned=EP_ON_TWO)) == (2, 1, True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"software": software("cpu", cpu_ops=())}, "not built"),
        ({"wishes": {"flash_dmoe": (Wish.OFF, "flag --disable-flash-dmoe")}}, "flash_dmoe is off"),
        ({"pinned": EP_ON_TWO | {"--data-parallel-size": "2"}}, "data parallelism"),
    ],
)
def test_expert_parallel_on_the_cpu_without_our_kernel_is_refused_because_stock_would_crash(changes, why):
    with pytest.raises(UnsupportedError, match="end the server") as caught:
        decide(tiny_moe(), cpu_machine(), **({"pinned": EP_ON_TWO} | changes))
    assert why in str(caught.value)


def test_data_parallel_copies_on_the_cpu_do_not_share_experts_that_no_kernel_could_compute():
    assert split(decide(tiny_moe(), cpu_machine(), pinned={"--data-parallel-size": "2"})) == (1, 2, False)


LAYOUTS = "benchmarks/records/2026-11-21_h200_layouts.json"
ROOT = Path(__file__).parents[4]


def measured() -> dict[str, Any]:
    """Layout -> clients -> what was measured."""
    return {side: found["loads"] for side, found in json.loads((ROOT / LAYOUTS).read_text())["sides"].items()}


def experts_against(other: str) -> list[str]:
    """Return by how much a token took longer or shorter with whole experts than in another layout, by clients."""
    sides, words = measured(), []
    for clients in ("1", "16", "128"):
        took, before = (sides[side][clients]["tpot_ms_median"] for side in ("experts", other))
        change = round(100 * (took / before - 1))
        words.append(f"{abs(change)} % {'longer' if change > 0 else 'shorter'}")
    return words


@pytest.mark.parametrize("count", [2, 4, 8])
def test_expert_parallel_over_few_gpus_is_warned_of_with_the_figures_of_the_record(count):
    decision = decide(qwen3_30b_a3b(), gpus("h200", count), pinned={"--enable-expert-parallel": ""})
    (warning,) = decision.warnings
    assert re.match(f"EP over {count} .* 2 H200", warning)
    of_slices, of_replicas = warning.split("; ")[:2]
    assert re.findall(r"\d+ % (?:longer|shorter)", of_slices) == experts_against("slices")
    assert re.findall(r"\d+ % (?:longer|shorter)", of_replicas) == experts_against("replicas")
    assert "--enable-replicas" in of_replicas
    assert "random weights" in warning
    # Others published for eight GPUs; ours are two.
    assert ("vllm-project/vllm issue 28887" in warning) is (count > 2)
    assert decision.evidence == (LAYOUTS,)


@pytest.mark.parametrize(
    ("machine", "model", "pinned"),
    [
        (gpus("h200", 4), qwen3_30b_a3b(), {"--tensor-parallel-size": "4"}),
        (cpu_machine(), tiny_moe(), EP_ON_TWO),
        (gpus("h200", 16), shaped_model(experts=128), {"--enable-expert-parallel": ""}),
    ],
    ids=["slices", "CPU", "many GPUs"],
)
def test_what_was_measured_on_few_gpus_with_expert_parallel_is_said_of_nothing_else(machine, model, pinned):
    decision = decide(model, machine, pinned=pinned)
    assert not [warning for warning in decision.warnings if warning.startswith("EP over")]
    assert decision.evidence == ()


def test_the_table_of_layouts_is_that_of_the_record():
    text = (ROOT / "docs" / "passes" / "parallelism.md").read_text()
    assert LAYOUTS in text
    for side, loads in measured().items():
        words = "whole experts" if side == "experts" else side
        (row,) = (line for line in text.splitlines() if line.startswith(f"| {words} ("))
        cells = [f"{load['tpot_ms_median']:.2f} ms, {load['output_tokens_per_s']:.0f}/s" for load in loads.values()]
        assert row.endswith(f" | {' | '.join(cells)} |")


def test_the_percentages_of_replicas_are_those_of_the_record():
    text = (ROOT / "docs" / "passes" / "replicas.md").read_text()
    assert LAYOUTS in text
    pairs = list(zip(measured()["slices"].values(), measured()["replicas"].values(), strict=True))
    longer = [f"{ours['tpot_ms_median'] / slices['tpot_ms_median'] - 1:.0%}" for slices, ours in pairs]
    fewer = [f"{1 - ours['output_tokens_per_s'] / slices['output_tokens_per_s']:.0%}" for slices, ours in pairs]
    for name, percentages in (("longer time per output token", longer), ("fewer tokens per second", fewer)):
        assert f"| {name} | {' | '.join(each.replace('%', ' %') for each in percentages)} |" in text
