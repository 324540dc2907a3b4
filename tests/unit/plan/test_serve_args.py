from __future__ import annotations

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.plan.serve_args import drain_timeout_s, flag_value, read_integer, split_arguments, without_flags


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["-tp", "2"], ["--tensor-parallel-size"]),
        (["--max_model_len=8k"], ["--max-model-len"]),
        (["--no-enable-prefix-caching"], ["--enable-prefix-caching"]),
        (["--device-memory-utilization", "0.5"], ["--gpu-memory-utilization"]),
        (["--eplb_config.num_redundant_experts", "2"], ["--eplb-config.num_redundant_experts"]),
        (["-cc.mode=3", "-O3", "-O", "3"], ["--compilation-config.mode", *["--optimization-level"] * 2]),
        (["-ep"], ["--enable-expert-parallel"]),
        (["--seed", "-1", "--x"], ["--seed", "--x"]),
    ],
)
def test_every_spelling_of_a_flag_has_one_name(words, flags):
    assert [argument.flag for argument in split_arguments(words)] == flags


def test_a_flag_keeps_all_its_values():
    (argument,) = split_arguments(["--cudagraph-capture-sizes", "1", "2", "4"])
    assert argument.tokens == ("--cudagraph-capture-sizes", "1", "2", "4")
    assert argument.value == "1 2 4"


@pytest.mark.parametrize("words", [["-O0"], ["-O", "0"], ["-O=0"], ["--optimization-level", "0"]])
def test_an_optimization_level_has_its_value_in_every_spelling(words):
    assert flag_value(words, "--optimization-level") == "0"


def test_a_word_before_the_first_flag_is_refused():
    with pytest.raises(InputError, match="got 'model', expected a flag") as caught:
        split_arguments(["model", "--seed", "1"])
    assert caught.value.hint is not None


def test_dropping_a_flag_takes_its_values_and_leaves_the_rest():
    words = ["--a", "1", "--max_model_len=5", "--b"]
    assert without_flags(words, {"--max-model-len"}) == ("--a", "1", "--b")


def test_the_last_of_repeated_values_counts_as_in_argparse():
    assert flag_value(["--port", "1", "--port=2"], "--port") == "2"
    assert flag_value(["--port", "1"], "--host") is None


@pytest.mark.parametrize(
    ("text", "number"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5K", 1536), ("2M", 2 * 2**20), ("1g", 10**9)]
)
def test_numbers_are_read_as_vllm_reads_them(text, number):
    assert read_integer(text, flag="--x") == number


@pytest.mark.parametrize("text", ["", "x", "-1", "1e3", "8kk", "9" * 5000 + "x"])
def test_what_is_no_number_names_the_flag(text):
    with pytest.raises(InputError, match="--max-model-len: got"):
        read_integer(text, flag="--max-model-len")


def test_the_drain_is_what_the_flag_says_and_vllms_own_0_without_it():
    assert drain_timeout_s(["--shutdown-timeout", "45"]) == 45
    assert drain_timeout_s(["--port", "1"]) == 0


def test_a_shutdown_timeout_that_is_no_number_is_refused():
    with pytest.raises(InputError, match=r"--shutdown-timeout: got 'soon'"):
        drain_timeout_s(["--shutdown-timeout", "soon"])
