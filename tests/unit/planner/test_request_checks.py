"""What is refused of a request before anything is decided: other servers, and wishes that contradict each other."""

from __future__ import annotations

import json
import re

import pytest

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.pass_params import ExpertPlacementParams
from moe_optimizer.planner import make_plan
from tests.builders import gpus, made_plan, qwen3_30b_a3b, request


@pytest.mark.parametrize(
    "words",
    ["--nnodes 2", "-r 1", "-dpl 1", "--data-parallel-external-lb", "-dph", "--data-parallel-rank 1", "-dpr 1"],
)
def test_a_part_of_a_server_on_several_machines_is_not_the_server_that_was_planned(words):
    with pytest.raises(InputError, match="vllm arguments: --"):
        made_plan(qwen3_30b_a3b(), gpus("h200", 8), vllm_args=tuple(words.split()))


@pytest.mark.parametrize("flag", ["--pipeline-parallel-size", "--prefill-context-parallel-size"])
def test_a_split_that_takes_more_gpus_than_were_planned_is_refused(flag):
    with pytest.raises(UnsupportedError, match=f"^{flag}: "):
        made_plan(qwen3_30b_a3b(), gpus("h200", 8), vllm_args=(flag, "2"))
    assert made_plan(qwen3_30b_a3b(), gpus("h200", 8), vllm_args=(flag, "1"))


def test_a_batch_size_that_nothing_would_use_is_a_contradiction():
    off = resolve_wishes([], ["scheduler"])
    with pytest.raises(InputError, match="--batch-size 8 and --disable-scheduler "):
        made_plan(qwen3_30b_a3b(), gpus("h200"), wishes=off, batch_size=8)
    assert made_plan(qwen3_30b_a3b(), gpus("h200"), wishes=off)


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("--eplb-config.num_redundant_experts 2", {"num_redundant_experts": 2}),
        ("--eplb_config.use_async=false --eplb-config.policy default", {"use_async": False, "policy": "default"}),
        ('--eplb-config {"window_size":5} --eplb-config.num_redundant_experts 2', {"num_redundant_experts": 2}),
        ("--eplb-config.a.b 1 --eplb-config.a.c x", {"a": {"b": 1, "c": "x"}}),
    ],
)
def test_a_configuration_given_key_by_key_is_the_one_that_vllm_makes_of_it(words, config):
    asked = request(qwen3_30b_a3b(), gpus("h200", 8), vllm_args=tuple(words.split()))
    (flag,) = asked.vllm_args.values.items()
    assert (flag[0], json.loads(flag[1])) == ("--eplb-config", config)


def test_a_configuration_given_key_by_key_contradicts_a_wish_as_a_whole_one_does():
    words = ("--quantization-config.moe", "fp8_per_block")
    asked = request(qwen3_30b_a3b(), gpus("h200", 8), wishes=resolve_wishes(["fp8"], []), vllm_args=words)
    said = '--enable-fp8 and --quantization-config {"moe": "fp8_per_block"} after --'
    with pytest.raises(InputError, match=re.escape(said)):
        make_plan(asked)


def test_a_configuration_given_key_by_key_takes_the_place_of_the_plans():
    wishes = resolve_wishes(["expert-placement", "expert-parallel"], [])
    words = ("--eplb-config.num_redundant_experts", "8")
    plan = made_plan(qwen3_30b_a3b(), gpus("h200", 8), wishes=wishes, vllm_args=words)
    assert [word for word in plan.serve_args.words if word.startswith("--eplb-config")] == [words[0]]
    assert plan.decision("expert_placement").params_as(ExpertPlacementParams).num_redundant_experts == 8
