"""Reading a page of metrics; what the launcher and the commands make of the samples is tested with them."""

from __future__ import annotations

import pytest

from moe_optimizer.launcher.metrics_page import samples, total

PAGE = r"""# HELP vllm:prompt_tokens_total Tokens
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="a\"b\\c"} 3.0
vllm:prompt_tokens_total{engine="1"} 1.2e+06
vllm:prompt_tokens_created{engine="0"} 9.0
another program's line
"""


def test_a_counter_is_summed_over_its_labels() -> None:
    assert total(PAGE, "vllm:prompt_tokens_total") == 1_200_003


def test_a_counter_that_is_absent_is_none_not_zero() -> None:
    assert total(PAGE, "vllm:prompt_tokens") is None


def test_labels_are_unescaped() -> None:
    assert samples(PAGE, "vllm:prompt_tokens_total")[0].labels["model_name"] == 'a"b\\c'


def test_a_line_with_the_prefix_that_is_no_sample_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"could not|invalid|Invalid"):
        samples(PAGE, "another")
