"""Option values: what is got, what is expected."""

from __future__ import annotations

import pytest
import typer

from moe_optimizer.cli.option_values import (
    HintedError,
    NotOneOfError,
    layout_name,
    milliseconds,
    one_of,
    seconds,
    seconds_or_none,
    whole_number,
)
from moe_optimizer.cli.options import ModelOptions
from moe_optimizer.errors import InputError


@pytest.mark.parametrize("text", ["0", "65536", "-1", "8000.5", "x", "", "1e3", "nan"])
def test_a_number_outside_the_range_is_refused_with_the_range(text: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        whole_number(1, 65_535)(text)
    assert repr(text) in caught.value.message
    assert "from 1 to 65535" in caught.value.message


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("65535", 65_535)])
def test_both_ends_of_the_range_are_taken(text: str, value: int) -> None:
    assert whole_number(1, 65_535)(text) == value


@pytest.mark.parametrize(("text", "value"), [("20", 20.0), ("20s", 20.0), ("0.5 s", 0.5)])
def test_a_time_may_have_its_unit(text: str, value: float) -> None:
    assert seconds(text) == seconds_or_none(text) == value


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "soon", "s", "20x"])
def test_a_time_that_is_not_positive_and_finite_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        seconds(text)
    assert repr(text) in caught.value.message


def test_a_near_miss_is_the_hint() -> None:
    with pytest.raises(NotOneOfError) as caught:
        one_of(("vllm", "embedded"))("vlm")
    assert "vllm" in str(caught.value.hint)


@pytest.mark.parametrize(("text", "value"), [("20", 20.0), ("20ms", 20.0), (" 2.5 ms", 2.5), ("1.5s", 1500.0)])
def test_a_limit_may_be_in_milliseconds_or_in_seconds(text: str, value: float) -> None:
    assert milliseconds(text) == value


@pytest.mark.parametrize("text", ["20sms", "-3", "0", "ms", "20us", "inf"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        milliseconds(text)


def test_what_is_no_layout_is_refused_with_an_example() -> None:
    assert layout_name("TP4x2") == "tp4x2"
    with pytest.raises(HintedError) as caught:
        layout_name("four")
    # The parser names the option.
    assert caught.value.message.startswith("got 'four'")
    assert "tp4x2" in str(caught.value.hint)


def test_the_model_may_be_named_in_either_way_but_not_two() -> None:
    assert ModelOptions(model_argument="a").model_name == "a"
    assert ModelOptions(model="a", model_argument="a").model_name == "a"
    with pytest.raises(InputError, match="two models"):
        _ = ModelOptions(model="a", model_argument="b").model_name
    with pytest.raises(InputError, match="is missing"):
        _ = ModelOptions().model_name
