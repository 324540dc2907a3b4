"""A kernel that is wrong only in captured graphs passes every check that runs without them.

The canary, which captures graphs of single layers, ends the start. The decode check ends it where vLLM's alone are
grossly wrong; `quality` catches what is less.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.launcher.launch import running
from moe_optimizer.measure.bench.side import STOCK, Side
from moe_optimizer.measure.quality.result import QualityResult
from moe_optimizer.measure.quality.run import run_quality
from moe_optimizer.measure.quality.table import render
from moe_optimizer.plan.serve_args import ServeArguments
from tests.free_ports import free_port
from tests.gpu.plans import always_ours, gpu_plan
from tests.vllm import wrong_kernels
from tests.vllm.conftest import FORKED, READY_TIMEOUT_S
from tests.vllm.test_measured import quietly, request_of

pytestmark = pytest.mark.gpu

LARGEST = 16
"""Tokens of the largest graph."""
CAPTURE = ("--cudagraph-capture-sizes", "1", "2", "4", "8", str(LARGEST))


@contextlib.contextmanager
def mistaken(folder: Path, mistake: str) -> Iterator[None]:
    """Have the servers of this block make a mistake."""
    site, switch = folder / "site", folder / "mistake"
    site.mkdir()
    switch.write_text(mistake)
    shutil.copy(wrong_kernels.__file__, site / "sitecustomize.py")
    shutil.copy(FORKED / "after_import.py", site)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
        patch.setenv("MOE_TEST_FAULT_FILE", str(switch))
        yield


def judged(folder: Path, mistake: str) -> QualityResult:
    """Serve our kernels and stock vLLM, one after the other, and compare them."""
    ours = gpu_plan(*CAPTURE, speeds=always_ours, max_model_len=512, batch_size=LARGEST)
    arguments = ours.plain_args.without("--port") + ServeArguments("--port", str(free_port()))
    stock = Side(name=STOCK, plan=ours.replace(serve_args=arguments))
    with mistaken(folder, mistake):
        return run_quality(request_of(Side(name="ours", plan=ours), stock, folder / "run"), on_step=quietly)


def test_right_graphs_keep_every_threshold(tmp_path: Path) -> None:
    found = judged(tmp_path, "")
    assert found.failed == (), render(found)


def test_a_kernel_that_is_wrong_in_every_captured_graph_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(RequiredNotAppliedError) as refused:
        judged(tmp_path, "captured")
    assert "flash_dmoe: canary before ready" in str(refused.value)
    assert "in a replayed graph" in str(refused.value)


def test_a_kernel_that_is_wrong_in_vllms_graphs_alone_is_caught_where_they_run(tmp_path: Path) -> None:
    found = judged(tmp_path, "captured by vllm")
    failed = {each.where for each in found.failed}
    assert "decode, 1 at once" in failed, render(found)
    prompts = [where for where in failed if where.startswith("prefill")]
    assert all(int(where.split()[1]) <= LARGEST for where in prompts), render(found)


def decode_checked(tmp_path: Path, mistake: str) -> str:
    """Start a server with its decode check, and return what the proof says of it."""
    plan = gpu_plan(*CAPTURE, speeds=always_ours, max_model_len=512, batch_size=LARGEST)
    run = running(plan, run_dir=tmp_path / "run", ready_timeout_s=READY_TIMEOUT_S, decode_check_s=60.0)
    with mistaken(tmp_path, mistake), run as info:
        (row,) = [each for each in info.rows if each.pass_name == "flash_dmoe"]
    return row.canary


def test_right_graphs_decode_what_prompts_compute(tmp_path: Path) -> None:
    assert re.search(r"; passed decode against prompt: \d+ tokens at 1, 8, 16 requests", decode_checked(tmp_path, ""))


def test_other_experts_in_vllms_graphs_alone_end_the_start(tmp_path: Path) -> None:
    with pytest.raises(RequiredNotAppliedError, match="decode check: server: 1 requests at once"):
        decode_checked(tmp_path, "captured by vllm: other experts")
