"""`quality` on real servers: a right plan keeps the thresholds, and every kind of wrong kernel is caught.

One start of stock vLLM and one of ours serve all tests: the wrong kernels are switched in the running server.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moe_optimizer.launcher.launch import running
from moe_optimizer.measure.bench.side import STOCK, Side
from moe_optimizer.measure.quality.corpus import text_of
from moe_optimizer.measure.quality.probes import Extent
from moe_optimizer.measure.quality.request import Alone, QualityRequest, telling
from moe_optimizer.measure.quality.result import QualityResult
from moe_optimizer.measure.quality.run import run_quality
from moe_optimizer.measure.quality.table import render
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.profiles import load_profile
from tests.free_ports import free_port
from tests.vllm import wrong_kernels
from tests.vllm.conftest import FORKED, READY_TIMEOUT_S, TINY_MOE, plan_here

pytestmark = pytest.mark.vllm

TOP = 64


@dataclass(frozen=True)
class Servers:
    """Stock vLLM's answers, and our running server with the switch of its mistakes."""

    base: QualityRequest
    switch: Path
    results: dict[str, QualityResult] = field(default_factory=dict)

    def judged(self, folder: Path, mistake: str) -> QualityResult:
        """Compare the server, with a mistake, with what stock vLLM has answered; each mistake once."""
        if mistake not in self.results:
            self.results[mistake] = self._judged(folder, mistake)
        return self.results[mistake]

    def _judged(self, folder: Path, mistake: str) -> QualityResult:
        for name in ("tokens.json", "reference"):
            place = self.base.folder / name
            (shutil.copytree if place.is_dir() else shutil.copy)(place, folder / name)
        self.switch.write_text(mistake)
        try:
            return run_quality(dataclasses.replace(self.base, folder=folder), on_step=lambda share, text: None)
        finally:
            self.switch.write_text("")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Servers, QualityResult]]:
    site, switch = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("switch") / "mistake"
    switch.write_text("")
    parts = (Path(wrong_kernels.__file__), FORKED / "sitecustomize.py")  # Python reads one file of this name
    (site / "sitecustomize.py").write_text("\n".join(part.read_text() for part in parts))
    ours = plan_here("--enforce-eager", dtype="bfloat16", wishes=resolve_wishes(("flash-dmoe",), ()))
    stock = ours.replace(serve_args=ours.plain_args.without("--port") + ServeArguments("--port", str(free_port())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
        patch.setenv("MOE_TEST_FAULT_FILE", str(switch))
        started = telling(Side(name="ours", plan=ours), TOP).plan
        assert started is not None
        with running(
            started, run_dir=tmp_path_factory.mktemp("ours"), require=frozenset({"flash_dmoe"}),
            ready_timeout_s=READY_TIMEOUT_S,
        ) as info:  # fmt: skip
            side = Side(name="ours", plan=ours, url=info.base_url)
            thresholds = load_profile("balanced").quality.model_dump()
            thresholds.pop("top_logprobs")
            request = QualityRequest(
                plan=side,
                reference=Side(name=STOCK, plan=stock),
                alone={"flash_dmoe": Alone(side=side, with_passes=(), value="")},
                not_alone={},
                always_alone=False,
                texts=text_of(TINY_MOE / "heldout.txt"),
                extent=Extent(positions=3000, generated=8),
                top_logprobs=TOP,
                thresholds=thresholds,
                prompts=("def add(a, b):\n    ", "import os\nimport "),
                prompt_tokens=8,
                model=str(TINY_MOE),
                folder=tmp_path_factory.mktemp("clean"),
                ready_timeout_s=READY_TIMEOUT_S,
            )
            clean = run_quality(request, on_step=lambda share, text: None)
            yield Servers(request, switch), clean


def test_a_right_plan_keeps_every_threshold(servers: tuple[Servers, QualityResult]) -> None:
    clean = servers[1]
    assert clean.failed == ()
    assert clean.not_numbers == 0
    assert {each.kind for each in clean.probes} == {"prefill", "decode"}
    assert {each.tokens for each in clean.probes if each.kind == "decode"} == {1, wrong_kernels.BATCH}
    assert clean.kl_mean.value is not None
    assert 0 < clean.kl_mean.value < 0.001


def test_the_kernel_is_named_with_its_dtype_and_backend(servers: tuple[Servers, QualityResult]) -> None:
    (kernel,) = servers[1].kernels
    assert kernel.backend == "moe_optimizer cpu"


def test_the_table_is_no_wider_than_a_terminal(servers: tuple[Servers, QualityResult]) -> None:
    assert max(map(len, render(servers[1]).splitlines())) <= 80


def test_the_users_prompts_stand_side_by_side(servers: tuple[Servers, QualityResult]) -> None:
    for prompt in servers[1].prompts:
        place = prompt.first_difference
        assert prompt.reference[:place] == prompt.plan[:place]
        assert (place is None) == (prompt.reference == prompt.plan)


MISTAKES = {
    "scale": "all",
    "swapped": "all",
    "stale scale": "all",
    "no number": f"decode, {wrong_kernels.BATCH} at once",
    "above": "prefill, 256 tokens",
    "frozen": f"decode, {wrong_kernels.BATCH} at once",
}
"""Mistake -> where it must show."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_kernel_is_caught_and_its_pass_named(
    servers: tuple[Servers, QualityResult], mistake: str, tmp_path: Path
) -> None:
    found = servers[0].judged(tmp_path, mistake)
    assert MISTAKES[mistake] in {each.where for each in found.failed}, render(found)
    assert {each.pass_name for each in found.failed} == {"flash_dmoe"}


def test_what_goes_wrong_only_in_large_steps_shows_only_there(
    servers: tuple[Servers, QualityResult], tmp_path: Path
) -> None:
    found = servers[0].judged(tmp_path, "above")
    # Eight prompts together are one step of 512 tokens before they are continued.
    assert not {"decode, 1 at once", "prefill, 64 tokens"} & {each.where for each in found.failed}
