from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from moe_optimizer.errors import InputError
from moe_optimizer.plan.json_codec import decode, encode
from moe_optimizer.plan.serve_args import Argument, ServeArguments, argument_lines, read_integer


def given(text: str) -> ServeArguments:
    return ServeArguments(*text.split())


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("-tp 2", ["--tensor-parallel-size"]),
        ("--max_model_len=8k", ["--max-model-len"]),
        ("--no-enable-prefix-caching", ["--enable-prefix-caching"]),
        ("--device-memory-utilization 0.5", ["--gpu-memory-utilization"]),
        ("-O3 -O 3", ["--optimization-level"] * 2),
        ("-ep", ["--enable-expert-parallel"]),
        ("--seed -1 --x", ["--seed", "--x"]),
    ],
)
def test_every_spelling_of_a_flag_has_one_name(words, flags):
    assert [argument.flag for argument in given(words).arguments] == flags


@pytest.mark.parametrize(
    ("words", "flag", "path"),
    [
        ("--eplb_config.num_redundant_experts 2", "--eplb-config", "num_redundant_experts"),
        ("-cc.mode=3", "--compilation-config", "mode"),
    ],
)
def test_a_key_of_a_configuration_is_kept_apart_from_its_flag(words, flag, path):
    (argument,) = given(words).arguments
    assert (argument.flag, argument.path) == (flag, path)


def test_a_flag_keeps_all_its_values():
    arguments = given("--cudagraph-capture-sizes 1 2 4")
    words = ("--cudagraph-capture-sizes", "1", "2", "4")
    assert arguments.arguments == (Argument("--cudagraph-capture-sizes", "", words),)
    assert arguments.value("--cudagraph-capture-sizes") == "1 2 4"


@pytest.mark.parametrize("words", ["-O0", "-O 0", "-O=0", "--optimization-level 0"])
def test_an_optimization_level_has_its_value_in_every_spelling(words):
    assert given(words).value("--optimization-level") == "0"


def test_a_word_before_the_first_flag_is_refused():
    with pytest.raises(InputError, match="got 'model'") as caught:
        given("model --seed 1")
    assert caught.value.hint is not None


def test_dropping_a_flag_takes_its_values_and_leaves_the_rest():
    assert given("--a 1 --max_model_len=5 --b").without("--max-model-len") == given("--a 1 --b")


def test_overriding_arguments_take_the_place_of_those_with_the_same_flags():
    planned = given("--a 1 --max-num-seqs 8 --eplb-config {} --enable-b")
    users = given("--max_num_seqs=4 --eplb-config.x 1 --no-enable-b")
    assert planned.overridden_by(users) == given("--a 1") + users


def test_the_last_of_repeated_values_counts_as_in_argparse():
    assert given("--port 1 --port=2").value("--port") == "2"
    assert given("--port 1").value("--host") is None


@pytest.mark.parametrize(("words", "is_on"), [("--enable-x", True), ("--no-enable-x", False), ("--y", False)])
def test_a_switch_is_on_when_it_is_given_and_not_negated(words, is_on):
    assert given(words).is_on("--enable-x") is is_on
    assert ("--enable-x" in given(words)) is ("x" in words)


def test_a_configuration_given_key_by_key_is_one_value():
    assert json.loads(given("--c.a.b 1 --c.a.d x").values["--c"]) == {"a": {"b": 1, "d": "x"}}


def test_in_json_arguments_are_a_list_of_words():
    arguments = given("--seed 7 --enable-x")
    assert encode(arguments) == ["--seed", "7", "--enable-x"]
    assert decode(ServeArguments, encode(arguments), origin="plan") == arguments
    for bad in (["stray"], "--seed", [7]):
        with pytest.raises(InputError, match=r"^plan"):
            decode(ServeArguments, bad, origin="plan")


@pytest.mark.parametrize(
    ("text", "number"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5K", 1536), ("2M", 2 * 2**20), ("1g", 10**9)]
)
def test_numbers_are_read_as_vllm_reads_them(text, number):
    assert read_integer(text, flag="--x") == given(f"--x {text}").count("--x") == number


@pytest.mark.parametrize("text", ["", "x", "-1", "1e3", "8kk", "9" * 5000 + "x"])
def test_what_is_no_number_names_the_flag(text):
    with pytest.raises(InputError, match="--max-model-len: got"):
        read_integer(text, flag="--max-model-len")


def test_a_count_is_at_least_one():
    with pytest.raises(InputError, match="--max-model-len: got 0"):
        given("--max-model-len 0").count("--max-model-len")


def test_the_drain_is_what_the_flag_says_and_vllms_own_0_without_it():
    assert given("--shutdown-timeout 45").drain_timeout_s() == 45
    assert given("--port 1").drain_timeout_s() == 0


def test_a_shutdown_timeout_that_is_no_number_is_refused():
    with pytest.raises(InputError, match=r"--shutdown-timeout: got 'soon'"):
        given("--shutdown-timeout soon").drain_timeout_s()


@drawn(st.lists(st.text("abc 1-'", min_size=1, max_size=12), max_size=30), st.integers(20, 90))
def test_lines_of_an_argument_are_its_words_and_fit(values: list[str], width: int) -> None:
    words = ["--flag", *values]
    lines = argument_lines(words, width)
    assert shlex.split(" ".join(lines)) == words
    assert all(len(line) <= max(width, 4 + max(map(len, map(shlex.quote, words)))) for line in lines)
