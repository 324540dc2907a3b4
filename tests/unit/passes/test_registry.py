from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import BaseModel

from moe_optimizer.errors import InputError
from moe_optimizer.passes.registry import PASS_NAMES, all_passes, check_wishes, required_key, resolve_wishes, switches
from moe_optimizer.plan.decision import Wish
from moe_optimizer.profiles.schema import Passes


def test_every_pass_has_a_section_in_the_profile_and_every_section_a_pass():
    assert sorted(PASS_NAMES) == sorted(Passes.model_fields)
    assert [each.name for each in all_passes()] == list(PASS_NAMES)


def test_the_switches_are_those_of_the_command_line():
    flags = {switch.flag: switch.key for switch in switches()}
    assert flags == {
        "parallelism": "parallelism",
        "expert-parallel": "parallelism.expert_parallel",
        "fp8": "fp8",
        "four-bit": "four_bit",
        "sparsity": "sparsity_24",
        "flash-dmoe": "flash_dmoe",
        "expert-load": "expert_load",
        "expert-placement": "expert_placement",
        "tuned-configs": "tuned_configs",
        "graph-capture": "graph_capture",
        "speculation": "speculation",
        "norm-rope-fusion": "norm_rope_fusion",
        "skinny-gemm": "skinny_gemm",
        "scheduler": "scheduler",
        "kv-cache": "kv_cache",
        "kv-tiering": "kv_cache.tiering",
        "disaggregation": "disaggregation",
        "replicas": "replicas",
        "dual-batch-overlap": "dual_batch_overlap",
    }


def test_every_setting_with_a_flag_is_auto_on_or_off_in_the_profile():
    for switch in switches():
        name, _, setting = switch.key.partition(".")
        if setting:
            section = Passes.model_fields[name].annotation
            assert isinstance(section, type)
            assert issubclass(section, BaseModel)
            assert str(section.model_fields[setting].annotation) == "typing.Literal['auto', 'on', 'off']"


def test_wishes_name_the_flag_they_came_from():
    assert resolve_wishes(["fp8", "kv-tiering"], ["sparsity"]) == {
        "fp8": (Wish.ON, "flag --enable-fp8"),
        "kv_cache.tiering": (Wish.ON, "flag --enable-kv-tiering"),
        "sparsity_24": (Wish.OFF, "flag --disable-sparsity"),
    }


@pytest.mark.parametrize(
    ("enabled", "disabled", "both"),
    [
        (["fp8"], ["fp8"], ("--enable-fp8", "--disable-fp8")),
        (["kv-tiering"], ["kv-cache"], ("--enable-kv-tiering", "--disable-kv-cache")),
        (["expert-parallel"], ["parallelism"], ("--enable-expert-parallel", "--disable-parallelism")),
        (["fp8", "sparsity"], [], ("--enable-fp8", "--enable-sparsity")),
        (["four-bit", "sparsity"], [], ("--enable-four-bit", "--enable-sparsity")),
        (["four-bit"], ["flash-dmoe"], ("--enable-four-bit", "--disable-flash-dmoe")),
        (["disaggregation", "replicas"], [], ("--enable-disaggregation", "--enable-replicas")),
        (["dual-batch-overlap"], ["expert-parallel"], ("--enable-dual-batch-overlap", "--disable-expert-parallel")),
        (["dual-batch-overlap"], ["parallelism"], ("--enable-dual-batch-overlap", "--disable-parallelism")),
        (["expert-placement"], ["expert-parallel"], ("--enable-expert-placement", "--disable-expert-parallel")),
        (["sparsity"], ["flash-dmoe"], ("--enable-sparsity", "--disable-flash-dmoe")),
        (["expert-load", "dual-batch-overlap"], [], ("--enable-expert-load", "--enable-dual-batch-overlap")),
        (["flash-dmoe", "dual-batch-overlap"], [], ("--enable-flash-dmoe", "--enable-dual-batch-overlap")),
    ],
)
def test_flags_that_contradict_each_other_are_both_named(enabled, disabled, both):
    with pytest.raises(InputError, match="contradict") as caught:
        resolve_wishes(enabled, disabled)
    assert all(flag in str(caught.value) for flag in both)


@pytest.mark.parametrize(
    ("required", "enabled", "disabled", "both"),
    [
        (["fp8"], [], ["fp8"], ("--require fp8", "--disable-fp8")),
        (["fp8"], ["sparsity"], [], ("--require fp8", "--enable-sparsity")),
        (["fp8", "sparsity-24"], [], [], ("--require fp8", "--require sparsity-24")),
        (["kv-tiering"], [], ["kv-cache"], ("--require kv-tiering", "--disable-kv-cache")),
    ],
)
def test_a_requirement_contradicts_what_asking_for_it_contradicts(required, enabled, disabled, both):
    with pytest.raises(InputError, match="contradict") as caught:
        resolve_wishes(enabled, disabled, required)
    assert all(flag in str(caught.value) for flag in both)


@pytest.mark.parametrize("flag", ["fp8", "expert-parallel", "expert-placement"])
def test_on_the_cpu_build_nothing_that_needs_our_kernel_goes_with_it_off(flag):
    wishes = resolve_wishes([flag], ["flash-dmoe"])
    check_wishes(wishes, "cuda")
    with pytest.raises(InputError, match=f"--enable-{flag} and --disable-flash-dmoe "):
        check_wishes(wishes, "cpu")


def test_an_unknown_flag_gets_a_near_match():
    with pytest.raises(InputError) as caught:
        resolve_wishes(["flash-dome"], [])
    assert "flash-dmoe" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["flash-dmoe", "flash_dmoe", "Flash_DMoE"])
def test_a_pass_is_found_by_name_or_flag(text):
    assert required_key(text) == "flash_dmoe"


def test_sparsity_is_found_by_its_flag_and_an_unknown_pass_gets_a_near_match():
    assert required_key("sparsity") == required_key("sparsity-24") == "sparsity_24"
    with pytest.raises(InputError, match=r"^--require:.*'schedule',.*kv-tiering") as caught:
        required_key("schedule")
    assert "scheduler" in str(caught.value.hint)


def test_asking_for_the_switches_imports_neither_pydantic_nor_yaml():
    code = (
        "import sys; from moe_optimizer.passes.registry import switches; switches();"
        "print([name for name in ('pydantic', 'yaml', 'rich', 'torch', 'vllm') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout.strip() == "[]"
