"""Models and engines that several tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Read by Triton when it is imported, which transformers does: its kernels are interpreted on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.engine import tiny_models
from tests.needed import skip_without

skip_without("transformers")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="random traffic for 100,000 steps")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a model of `tiny_models.SHAPES` once and returns its folder."""
    written: dict[tuple[str, str], Path] = {}

    def folder(name: str, **arguments: Any) -> Path:
        key = (name, repr(arguments))
        if key not in written:
            written[key] = tiny_models.write_model(tmp_path_factory.mktemp(name), name, **arguments)
        return written[key]

    return folder


@pytest.fixture(scope="session")
def tiny_moe_llm() -> Any:
    """The trained model of the examples, for requests that leave nothing behind."""
    from moe_optimizer.engine import LLM

    return LLM(str(tiny_models.TINY_MOE), dtype="float32", max_num_seqs=64)
