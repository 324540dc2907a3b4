"""Checkpoints of GPTQ, AWQ and compressed-tensors on a GPU: their integers by our CUDA kernels, in graphs, beside the
same weights in BF16 by vLLM's own kernel.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.launcher.launch import running
from moe_optimizer.plan.decision import Wish
from moe_optimizer.proof.record import Proof, read_proofs
from tests.gpu.plans import gpu_plan
from tests.int4_checkpoint import Form, write_int4
from tests.vllm.answers import assert_same_up_to_a_tie
from tests.vllm.conftest import READY_TIMEOUT_S, Answer, ask

pytestmark = pytest.mark.gpu

GROUP, EXPERTS, LAYERS, WEIGHTS = 64, 16, 4, 3 * 128 * 128
ARGUMENTS = ("--no-enable-prefix-caching", "--logprobs-mode", "raw_logits")
CAPTURE = ("--cudagraph-capture-sizes", "1", "2", "4", "8", "16")


def served(folder: Path, form: Form, *, zero_points: bool, wish: Wish) -> tuple[tuple[Answer, ...], tuple[Proof, ...]]:
    plan = gpu_plan(
        *ARGUMENTS, *CAPTURE, model=write_int4(folder / form, form, group=GROUP, zero_points=zero_points),
        wishes={"flash_dmoe": (wish, "test")}, required=frozenset({"flash_dmoe"} if wish is Wish.ON else ()),
        max_model_len=520, batch_size=16,
    )  # fmt: skip
    run_dir = folder / f"run-{form}"
    with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
        answers = ask(info.base_url)
    # Written a last time when the server ended: with what the requests ran.
    return answers, read_proofs(run_dir)


# vLLM reads no other GPTQ than the symmetric kind.
@pytest.mark.parametrize(("form", "zero_points"), [("gptq", False), ("awq", True), ("compressed-tensors", True)])
def test_our_kernels_read_the_integers_of_the_checkpoint(
    form: Form, zero_points: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    wanted, _ = served(tmp_path, "dequantized", zero_points=zero_points, wish=Wish.OFF)
    answers, proofs = served(tmp_path, form, zero_points=zero_points, wish=Wish.ON)
    for want, got in zip(wanted, answers, strict=True):
        assert_same_up_to_a_tie(want, got, spacings=2)
    entry = next(each.passes["flash_dmoe"] for each in proofs if each.passes["flash_dmoe"].layers)
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert entry.canary.startswith("passed")
    assert len(entry.layers) == LAYERS
    for layer in entry.layers:
        assert (layer.weight_format, layer.weight_dtype) == ("int4_stored", "uint8")
        assert layer.weight_bytes == EXPERTS * WEIGHTS * (4 + (24 if zero_points else 16) / GROUP) / 8
        # A prompt of the test has more than 64 tokens together with the others.
        assert set(layer.calls_by_kernel) == {"direct", "grouped-int4_weights"}
        assert layer.self_check_error is not None
