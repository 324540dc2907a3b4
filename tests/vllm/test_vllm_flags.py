"""What is read from vLLM's sources about its flags, beside vLLM's own parser."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from moe_optimizer.inspection.vllm_installation import find_vllm
from moe_optimizer.inspection.vllm_sources import unknown_flags
from moe_optimizer.launcher.server_log import refusal
from moe_optimizer.plan.serve_args import ServeArguments


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """vLLM's own."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(prog="api_server.py"))


@pytest.fixture(scope="module")
def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions


def test_every_short_form_is_read_as_its_flag(actions: list[argparse.Action]) -> None:
    short = 0
    for action in actions:
        for flag in action.option_strings:
            if not flag.startswith("--") and flag != "-h":
                assert ServeArguments(flag).arguments[0].flag in action.option_strings, (
                    f"{flag} of {action.option_strings}"
                )
                short += 1
    assert short > 10


def test_no_flag_of_vllms_own_parser_is_called_unknown(actions: list[argparse.Action]) -> None:
    installed = find_vllm()
    assert installed is not None
    flags = [flag for action in actions for flag in action.option_strings if flag.startswith("--")]
    assert len(flags) > 300
    assert unknown_flags(Path(installed.location), ServeArguments(*flags)) == ()


def test_the_last_words_of_the_parser_are_read_as_a_refusal(
    parser: argparse.ArgumentParser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--seed", "soon"])
    (tmp_path / "server.log").write_text(capsys.readouterr().err)
    assert isinstance(caught.value.code, int)
    why = refusal(tmp_path / "server.log", caught.value.code)
    assert "--seed" in why
    assert "'soon'" in why
