"""What is read from vLLM's sources about its flags, beside vLLM's own parser."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from moe_optimizer.inspection import find_vllm
from moe_optimizer.inspection.vllm_flags import unknown_flags
from moe_optimizer.plan.serve_args import ServeArguments

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def actions() -> list[argparse.Action]:
    """What vLLM's own parser takes."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())._actions


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
