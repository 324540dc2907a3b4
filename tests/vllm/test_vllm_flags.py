"""What is read from vLLM's sources about its flags, beside vLLM's own parser."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.inspection import find_vllm
from moe_optimizer.inspection.vllm_flags import unknown_flags

pytestmark = pytest.mark.vllm


def test_no_flag_of_vllms_own_parser_is_called_unknown() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    installed = find_vllm()
    assert installed is not None
    parser = make_arg_parser(FlexibleArgumentParser())
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    assert len(flags) > 300
    assert unknown_flags(Path(installed.location), flags) == ()
