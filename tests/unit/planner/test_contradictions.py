"""Wrong input, and flags and arguments that say opposite things."""

from __future__ import annotations

import re

import pytest

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.passes.registry import resolve_wishes
from tests.builders import cpu_machine, dense_model, gpus, made_plan, profile_with, qwen3_30b_a3b, request
from tests.unit.planner.refusal import refused


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
            ("balanced requires fp8", "--disable-fp8"),
        ),
        (
            {"profile": profile_with(passes={"fp8": {"required": True, "mode": "off"}})},
            ("balanced requires fp8", "balanced switches"),
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
        (
            {"batch_size": 8, "profile": profile_with(passes={"scheduler": {"mode": "off"}})},
            ("--batch-size 8", "profile balanced"),
        ),
        ({"max_model_len": 0}, ("--max-model-len: got 0",)),
        ({"host": " "}, ("--host: got ' '",)),
        ({"port": 65536}, ("--port: got 65536",)),
        ({"dtype": "int4"}, ("--dtype: got 'int4'", "bfloat16")),
        ({"vllm_args": ("--speculative-config", "ngram")}, ("--speculative-config: got 'ngram'", "JSON object")),
        ({"vllm_args": ("-sc", "[4]")}, ("--speculative-config: got '[4]'", "JSON object")),
        ({"vllm_args": ("--max-num-seqs", "many")}, ("--max-num-seqs: got 'many'",)),
        ({"vllm_args": ("--gpu-memory-utilization", "2")}, ("--gpu-memory-utilization: got '2'",)),
    ],
)
def test_wrong_or_contradicting_input_names_what_was_given(changes, words):
    message = str(refused(request(qwen3_30b_a3b(), gpus("h100_sxm"), **changes)))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("flag", "argument"),
    [
        ("--disable-kv-tiering", "--kv-offloading-size 4"),
        ("--enable-kv-cache", "--kv-cache-dtype bfloat16"),
        ("--enable-kv-cache", "--kv-cache-dtype auto"),
        ("--enable-kv-tiering", "--no-enable-prefix-caching"),
        ("--enable-kv-tiering", "--kv-transfer-config {}"),
        ("--enable-dual-batch-overlap", "--all2all-backend naive"),
        ("--enable-graph-capture", "--optimization-level 0"),
        ("--enable-graph-capture", "--max-cudagraph-capture-size 0"),
        ("--enable-disaggregation", "--kv-offloading-size 4"),
        ("--disable-dual-batch-overlap", "--enable-dbo"),
        ("--enable-dual-batch-overlap", "--no-enable-dbo"),
        ("--disable-expert-placement", "--enable-eplb"),
        ("--enable-expert-placement", "--no-enable-eplb"),
        ("--disable-parallelism", "--data-parallel-size 2"),
        ("--disable-parallelism", "--tensor-parallel-size 2"),
        ("--enable-expert-parallel", "--no-enable-expert-parallel"),
        ("--enable-expert-load", "--enable-return-routed-experts"),
        ("--enable-flash-dmoe", "--moe-backend flashinfer_cutlass"),
        ("--disable-fp8", "--quantization fp8"),
        ("--enable-fp8", "--quantization gptq"),
        ("--enable-fp8", "--quantization-config {}"),
        ("--enable-sparsity", "--quantization fp8"),
        ("--enable-disaggregation", "--kv-transfer-config {}"),
        ("--enable-disaggregation", "--ssl-certfile cert.pem"),
        ("--enable-disaggregation", '--speculative-config {"method":"ngram"}'),
        ("--enable-replicas", "--ssl-certfile cert.pem"),
        ("--enable-expert-load", "--enable-dbo"),
        ("--disable-kv-cache", "--kv-cache-dtype fp8_e5m2"),
    ],
)
def test_a_flag_and_an_argument_of_vllm_that_contradict_each_other_are_both_named(flag, argument):
    kind, _, name = flag.removeprefix("--").partition("-")
    wishes = resolve_wishes([name], []) if kind == "enable" else resolve_wishes([], [name])
    with pytest.raises(InputError, match=re.escape(f"{flag} and {argument} after -- ")):
        made_plan(qwen3_30b_a3b(), gpus("h200", 8), wishes=wishes, vllm_args=tuple(argument.split()))


@pytest.mark.parametrize(
    ("layout", "argument"),
    [
        ("tp1p1d1", '--speculative-config {"method":"ngram"}'),
        ("tp1p1d1", "--kv-transfer-config {}"),
        ("tp1p1d1", "--ssl-certfile cert.pem"),
        ("tp1x2", "--ssl-certfile cert.pem"),
        ("tp2", "--enable-expert-parallel"),
        ("tp2ep", "--no-enable-expert-parallel"),
    ],
)
def test_a_pinned_layout_and_an_argument_that_its_servers_cannot_have_are_both_named(layout, argument):
    asked = request(qwen3_30b_a3b(), gpus("h200", 2), layout=layout, vllm_args=tuple(argument.split()))
    assert f"--layout {layout} and {argument} after -- " in str(refused(asked, InputError))


@pytest.mark.parametrize(
    ("machine", "layout"),
    [(gpus("h200"), None), (gpus("h200", 2), "tp2"), (cpu_machine(gib=256), None)],
    ids=["one", "slices", "cpu"],
)
def test_a_load_balancer_without_whole_experts_to_balance_is_refused(machine, layout):
    asked = request(qwen3_30b_a3b(), machine, vllm_args=("--enable-eplb",), layout=layout)
    error = refused(asked, UnsupportedError)
    assert str(error).startswith("--enable-eplb after -- ")


def test_no_whole_experts_are_taken_of_a_model_without_experts():
    assert made_plan(dense_model(), gpus("h200"), vllm_args=("--no-enable-expert-parallel",))


def test_a_load_balancer_over_whole_experts_is_taken():
    asked = ("--enable-eplb", "--enable-expert-parallel")
    assert made_plan(qwen3_30b_a3b(), gpus("h200", 2), vllm_args=asked)


@pytest.mark.parametrize("asked", [("--api-key", "sesame"), ("--api-key=sesame",), ("--api_key", "sesame")])
def test_a_key_on_the_command_line_is_refused_and_not_repeated(asked):
    message = str(refused(request(qwen3_30b_a3b(), gpus("h200"), vllm_args=asked)))
    assert message.startswith("vllm arguments: --api-key: ")
    assert "VLLM_API_KEY" in message
    assert "sesame" not in message


def test_no_fp8_cache_and_the_models_own_type_say_the_same():
    wishes = resolve_wishes([], ["kv-cache"])
    assert made_plan(qwen3_30b_a3b(), gpus("h200"), wishes=wishes, vllm_args=("--kv-cache-dtype", "auto"))


@pytest.mark.parametrize(
    ("flag", "argument"),
    [
        ("flash-dmoe", "--moe-backend triton"),
        ("expert-parallel", "--enable-expert-parallel"),
        ("dual-batch-overlap", "--enable-dbo"),
        ("graph-capture", "--no-enforce-eager"),
        ("graph-capture", "-O2"),
        ("kv-cache", "--kv-cache-dtype fp8_e5m2"),
        ("kv-tiering", "--enable-prefix-caching"),
        ("dual-batch-overlap", "--all2all-backend deepep_high_throughput"),
    ],
)
def test_a_flag_and_an_argument_that_say_the_same_are_taken(flag, argument):
    wishes = resolve_wishes([flag], [])
    assert made_plan(qwen3_30b_a3b(), gpus("h200", 8), wishes=wishes, vllm_args=tuple(argument.split()))


def test_a_short_form_contradicts_as_its_long_one_does():
    wishes = resolve_wishes(["graph-capture"], [])
    asked = request(qwen3_30b_a3b(), gpus("h200", 8), wishes=wishes, vllm_args=("-O0",))
    assert str(refused(asked)).startswith("--enable-graph-capture and --optimization-level 0 ")
