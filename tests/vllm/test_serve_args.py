"""Every argument that a plan gives to `vllm serve` is one that vLLM's own parser takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.conftest import ROOT

pytestmark = pytest.mark.vllm
PLANS = sorted((ROOT / "tests" / "golden" / "plans").glob("*.json"))


@pytest.fixture(scope="module")
def parse() -> Callable[[list[str]], object]:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # pyright: ignore[reportMissingImports] - 0.26
    return make_arg_parser(FlexibleArgumentParser()).parse_args


def test_there_are_golden_plans() -> None:
    assert PLANS


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
@pytest.mark.parametrize("key", ["serve_args", "plain_args"])
def test_vllm_parses_the_arguments(path: Path, key: str, parse: Callable[[list[str]], object]) -> None:
    arguments = json.loads(path.read_text())[key]
    try:
        parse(["--model", "any", *arguments])
    except SystemExit:
        pytest.fail(f"vLLM does not take {arguments}")
