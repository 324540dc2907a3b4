"""A kernel that is wrong only in captured graphs passes every check that runs without them.

The canary, which captures graphs of single layers, ends the start. Where vLLM's graphs of the whole model alone are
wrong, the comparison of a step with and without its graph ends it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.launcher.launch import running
from moe_optimizer.measure.bench.side import STOCK, Side
from moe_optimizer.measure.quality.result import QualityResult
from moe_optimizer.measure.quality.run import run_quality
from moe_optimizer.measure.quality.table import render
from moe_optimizer.plan.serve_args import ServeArguments
from tests.free_ports import free_port
from tests.gpu.plans import EXPERTS, always_ours, gpu_plan
from tests.vllm import wrong_kernels
from tests.vllm.conftest import FORKED, READY_TIMEOUT_S
from tests.vllm.test_measured import quietly, request_of

pytestmark = pytest.mark.gpu

LARGEST = 16
"""Tokens of the largest graph."""
CAPTURE = ("--cudagraph-capture-sizes", "1", "2", "4", "8", str(LARGEST))
TWO_GPUS = ("--tensor-parallel-size", "2", "--enable-expert-parallel")
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


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


def started(
    tmp_path: Path, mistake: str = "", *, warm_up_s: float = 60.0, decode_check_s: float = 0.0, gpus: int = 1
) -> str:
    """Start a server that makes a mistake, warm it up, and return what the proof says of the canary."""
    layout = TWO_GPUS if gpus > 1 else ()
    speeds = functools.partial(always_ours, num_experts=EXPERTS // gpus)
    plan = gpu_plan(*CAPTURE, *layout, speeds=speeds, num_gpus=gpus, max_model_len=512, batch_size=LARGEST)
    run = running(
        plan, run_dir=tmp_path / "run", ready_timeout_s=READY_TIMEOUT_S, warm_up_s=warm_up_s,
        decode_check_s=decode_check_s,
    )  # fmt: skip
    with mistaken(tmp_path, mistake), run as info:
        (row,) = [each for each in info.rows if each.pass_name == "flash_dmoe"]
    return row.canary


@pytest.mark.parametrize("runner", ["0", "1"], ids=["runner V1", "runner V2"])
def test_right_graphs_give_what_steps_without_them_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    said = started(tmp_path)
    graphs = re.search(r"passed in (\d+) of (\d+) of vLLM's graphs", said)
    assert graphs, said
    assert 5 <= int(graphs[1]) <= int(graphs[2]), said


@pytest.mark.parametrize(
    ("mistake", "runner"),
    [
        ("scale", "0"), ("scale", "1"), ("swapped", "0"), ("stale scale", "0"), ("above", "0"), ("frozen", "0"),
        ("no number", "0"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_vllms_graphs_alone_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str, runner: str
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    with pytest.raises(RequiredNotAppliedError, match=r"canary before ready: vLLM's graph of \d+ tokens"):
        started(tmp_path, f"captured by vllm: {mistake}")


@NEEDS_TWO
@pytest.mark.parametrize("runner", ["0", "1"], ids=["runner V1", "runner V2"])
def test_right_graphs_of_two_gpus_give_what_steps_without_them_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    assert re.search(r"passed in \d+ of \d+ of vLLM's graphs", started(tmp_path, gpus=2))


@NEEDS_TWO
def test_what_is_wrong_in_the_graphs_of_one_of_two_gpus_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(RequiredNotAppliedError, match=r"canary before ready: vLLM's graph of \d+ tokens"):
        started(tmp_path, "captured by vllm: one rank", gpus=2)


def test_right_kernels_decode_what_prompts_compute(tmp_path: Path) -> None:
    said = started(tmp_path, warm_up_s=0.0, decode_check_s=60.0)
    assert re.search(r"; passed decode against prompt: \d+ tokens at 1, 8, 16 requests", said), said


def test_other_experts_at_few_tokens_end_the_start(tmp_path: Path) -> None:
    with pytest.raises(RequiredNotAppliedError, match="decode check: server: 1 requests at once"):
        started(tmp_path, "decode: other experts", warm_up_s=0.0, decode_check_s=60.0)
