"""The raw argument list: separator, repetition, contradiction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.cli.arguments import check_consistency, split_at_separator
from moe_optimizer.errors import InputError


def test_arguments_after_the_separator_are_not_ours() -> None:
    assert split_at_separator(["--port", "1", "--", "--port", "2"]) == (["--port", "1"], ["--port", "2"])


def test_no_separator_and_an_empty_rest_are_told_apart() -> None:
    assert split_at_separator(["a"]) == (["a"], None)
    assert split_at_separator(["a", "--"]) == (["a"], [])


def test_only_the_first_separator_splits() -> None:
    assert split_at_separator(["--", "a", "--", "b"]) == ([], ["a", "--", "b"])


@given(st.lists(st.text()))
def test_splitting_loses_nothing(arguments: list[str]) -> None:
    own, rest = split_at_separator(arguments)
    assert own + ([] if rest is None else ["--", *rest]) == arguments
    assert "--" not in own


@pytest.mark.parametrize(
    "arguments", [["--port", "1", "--port", "2"], ["--port=1", "--port", "2"], ["--json", "--json"]]
)
def test_an_option_given_twice_is_refused(arguments: list[str]) -> None:
    with pytest.raises(InputError, match=arguments[-1] if arguments[-1] != "2" else "--port"):
        check_consistency(arguments)


def test_require_may_be_repeated() -> None:
    check_consistency(["--require", "fp8", "--require", "scheduler"])


@pytest.mark.parametrize("arguments", [["--enable-fp8", "--disable-fp8"], ["--disable-fp8", "--enable-fp8"]])
def test_enable_and_disable_of_one_pass_contradict(arguments: list[str]) -> None:
    with pytest.raises(InputError, match="--enable-fp8 and --disable-fp8"):
        check_consistency(arguments)


def test_enable_of_one_and_disable_of_another_do_not_contradict() -> None:
    check_consistency(["--enable-fp8", "--disable-scheduler"])
