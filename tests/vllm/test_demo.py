"""The whole job once, by the command of `make demo`: two servers with every option as by default, the second in FP8.

What the other files ask servers of their own about dtypes, layouts and failures is asked here of what a user gets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from moe_optimizer.proof.record import PassProof, Proof, read_proofs
from moe_optimizer.proof.verdict import model_holders
from tests.contract.conftest import Finished, run
from tests.vllm.conftest import COMPILES, ROOT
from tests.vllm.heldout import reference_perplexity

BF16_LAYER_BYTES = 16 * 3 * 128 * 128 * 2
MAX_PERPLEXITY_RATIO = 1.005
"""The bound on quality. Seen: 17.127 with FP8, 17.115 with BF16, 17.110 in FP32."""


@dataclass(frozen=True)
class Demo:
    """The demo, ended, and what the processes of its servers wrote."""

    finished: Finished
    plain: tuple[Proof, ...]
    fp8: tuple[Proof, ...]

    def rows(self, pass_name: str) -> list[str]:
        """Return a pass's rows of the two tables, without the lines below them that say why."""
        lines = [line for line in self.finished.stderr.splitlines() if line.split()[:1] == [pass_name]]
        return [line for line in lines if not line.split()[1].endswith(":")]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    # The graphs of the two servers are the same, the kernels being ops in them: the second server finds what Inductor
    # compiled for the first. vLLM's own file of a compiled model has another key for each, and on the CPU vLLM 0.32
    # fails to load it; test_serving_equals_stock.py has it.
    compiled = {"VLLM_USE_AOT_COMPILE": "0", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), **COMPILES}
    demo = (str(ROOT / "scripts" / "demo.py"),)
    finished = run([], program=demo, cwd=folder, env=compiled, bounded=False, timeout_s=2500)
    assert finished.code == 0, finished
    plain, fp8 = sorted((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    return Demo(finished, read_proofs(plain), read_proofs(fp8))


@pytest.fixture
def converted(demo: Demo) -> PassProof:
    (holder,) = model_holders(demo.fp8)
    return holder.passes["fp8"]


def test_the_embedded_engine_answers_before_anything_is_planned(demo: Demo) -> None:
    said = demo.finished.stdout
    assert 0 <= said.find("'def __init__(self, name):' -> '") < said.index("--- the plan ---")


def test_it_serves_answers_and_stops(demo: Demo) -> None:
    assert "demo finished: " in demo.finished.stdout
    assert demo.finished.left_running == ()


def test_the_tables_show_our_kernel_and_fp8(demo: Demo) -> None:
    assert "yes, 4 layers" in demo.rows("flash_dmoe")[0]
    assert "yes, 4 layers" in demo.rows("fp8")[-1]


def test_every_layer_is_converted_and_runs(converted: PassProof) -> None:
    assert (converted.applied, converted.ran, converted.why_not) == (True, True, "")
    assert [layer.name for layer in converted.layers] == [f"model.layers.{index}.mlp.experts" for index in range(4)]
    for layer in converted.layers:
        assert (layer.weight_format, layer.weight_dtype, layer.why_plain) == ("fp8", "float8_e4m3fn", "")
        assert layer.calls > 0
        assert layer.output_error is not None
        assert 0.02 < layer.output_error < 0.06


def test_the_experts_take_half_of_the_memory(converted: PassProof) -> None:
    for layer in converted.layers:
        assert layer.loaded_bytes == BF16_LAYER_BYTES
        assert layer.weight_bytes == BF16_LAYER_BYTES // 2 + 16 * 3 * 4  # and a scale of 4 bytes for each matrix


def test_the_layers_were_converted_while_loading(demo: Demo) -> None:
    (holder,) = model_holders(demo.fp8)
    (patch,) = [each for each in holder.patches if each.target.endswith(":UnquantizedFusedMoEMethod.create_weights")]
    assert (patch.state, patch.detail) == ("applied", "")


def test_perplexity_stays_within_the_bound(demo: Demo) -> None:
    ((_, fp8),) = re.findall(r"^perplexity +([\d.]+) +([\d.]+)", demo.finished.stdout, re.MULTILINE)
    assert float(fp8) < reference_perplexity() * MAX_PERPLEXITY_RATIO


def test_without_the_flag_nothing_of_fp8_is_there(demo: Demo) -> None:
    for holder in model_holders(demo.plain):
        assert "fp8" not in holder.passes
        assert all(layer.weight_format == "plain" for layer in holder.passes["flash_dmoe"].layers)
        assert not any("create_weights" in patch.target for patch in holder.patches)


def test_what_is_asked_after_ready_waits_for_no_compiler(demo: Demo) -> None:
    for proofs in (demo.plain, demo.fp8):
        (holder,) = model_holders(proofs)
        assert holder.compilations is not None
        assert (holder.compilations.after_ready, holder.compilations.last) == (0, ())
    assert "compiled after ready: 0" in demo.finished.stderr
