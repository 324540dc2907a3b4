"""Flags of vLLM, read from its sources."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from moe_optimizer.inspection.vllm_sources import known_flags, unknown_flags
from moe_optimizer.plan.serve_args import ServeArguments

SOURCE = """
class FrontendArgs:
    chat_template: str | None = None
    optimization_level: int = 2

def add_cli_args(parser):
    group.add_argument("--max-num-seqs", type=int)
    group.add_argument("--compilation-config")
    group.add_argument("--enable-lora", action=BooleanOptionalAction)
"""


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text(SOURCE)
    return tmp_path


def test_a_flag_that_no_source_names_is_unknown(vllm: Path) -> None:
    assert unknown_flags(vllm, ServeArguments("--max-num-seqs", "3", "--max-num-sqes=4")) == ("--max-num-sqes",)


@pytest.mark.parametrize(
    "words",
    [
        ["--max_num_seqs", "3"],
        ["--max-num", "3"],  # argparse takes a beginning
        ["--chat-template", "x"],  # made from a field
        ["--no-enable-lora"],
        ["--compilation-config.mode=3"],
        ["-O3", "-cc.mode=3"],
    ],
)
def test_every_form_of_a_flag_that_vllm_takes_is_known(vllm: Path, words: list[str]) -> None:
    assert unknown_flags(vllm, ServeArguments(*words)) == ()


def test_nothing_is_unknown_where_the_sources_are_not(tmp_path: Path) -> None:
    assert unknown_flags(tmp_path, ServeArguments("--no-such-flag")) == ()


def test_nothing_is_unknown_where_a_platform_plugin_may_add_flags(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [group])
    assert unknown_flags(vllm, ServeArguments("--no-such-flag")) == ()


def test_literal_flags_are_there_for_a_near_match(vllm: Path) -> None:
    assert known_flags(vllm) == ("--compilation-config", "--enable-lora", "--max-num-seqs")
