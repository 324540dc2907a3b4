"""What the demo shows of FP8 beside BF16."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from demo_fp8 import Measured, comparison

OFF = Measured(expert_bytes=6_291_456, answers=(("a", "b", "c"), ("d", "e")), perplexity=17.111)
ON = Measured(expert_bytes=3_146_496, answers=(("a", "x", "c"), ("d", "e")), perplexity=17.122)


def test_memory_perplexity_and_tokens_stand_beside_each_other_in_a_terminals_width():
    lines = comparison(OFF, ON)
    assert [line[:40].split() for line in lines] == [
        ["off", "on"],
        ["expert", "weights", "6.29", "MB", "3.15", "MB"],
        ["perplexity", "17.111", "17.122"],
        ["greedy", "tokens", "5", "3"],
    ]
    assert all(len(line) <= 80 for line in lines), lines


def test_what_was_not_measured_is_not_shown():
    lines = comparison(dataclasses.replace(OFF, perplexity=None, expert_bytes=0), ON)
    assert [line[:16].strip() for line in lines] == ["", "greedy tokens"]
