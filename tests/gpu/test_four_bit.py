"""Experts in MXFP4 on a real server on a GPU: converted while loading, computed by our CUDA kernels at every size."""

from __future__ import annotations

import pytest

from moe_optimizer.launcher.launch import running
from moe_optimizer.plan.decision import Wish
from moe_optimizer.proof.record import read_proofs
from tests.gpu.plans import gpu_plan
from tests.vllm.conftest import READY_TIMEOUT_S, ask
from tests.vllm.heldout import heldout_perplexity, reference_perplexity

pytestmark = pytest.mark.gpu

BF16_LAYER_BYTES = 16 * 3 * 128 * 128 * 2
CAPTURE = ("--cudagraph-capture-sizes", "1", "2", "4", "8", "16")


@pytest.mark.parametrize(
    ("graphs", "wanted"),
    [(True, ("four_bit",)), (False, ("four_bit",)), (True, ("four_bit", "fp8"))],
    ids=["cuda-graphs", "eager", "fp8-linears"],
)
def test_every_layer_is_converted_and_the_model_still_speaks(graphs, wanted, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    plan = gpu_plan(
        "--no-enable-prefix-caching", *(CAPTURE if graphs else ("--enforce-eager",)),
        wishes={name: (Wish.ON, "test") for name in wanted}, required=frozenset(wanted), max_model_len=520,
        batch_size=16,
    )  # fmt: skip
    with running(plan, run_dir=tmp_path, ready_timeout_s=READY_TIMEOUT_S) as info:
        ask(info.base_url)
        got = heldout_perplexity(info)
    dense = reference_perplexity()
    # Not converted it would be within a thousandth of the dense model's; with weights in wrong places, in the hundreds.
    assert 1.001 * dense < got < 1.2 * dense, (dense, got)
    # Written a last time when the server ended: with what the requests ran.
    proofs = read_proofs(tmp_path)
    passes = next(each.passes for each in proofs if each.passes.get("four_bit") and each.passes["four_bit"].layers)
    # Required: had the linears stayed BF16, the server would not have been ready.
    assert ("fp8" not in wanted) or passes["fp8"].applied
    for name in ("four_bit", "flash_dmoe"):
        assert (passes[name].applied, passes[name].ran, passes[name].why_not) == (True, True, "")
        assert len(passes[name].layers) == 4
    for layer in passes["four_bit"].layers:
        assert (layer.weight_format, layer.weight_dtype, layer.why_plain) == ("mxfp4", "uint8", "")
        assert (layer.loaded_bytes, layer.weight_bytes * 16) == (BF16_LAYER_BYTES, BF16_LAYER_BYTES * 4.25)
        assert set(layer.calls_by_kernel) == {"direct", "grouped-mxfp4_weights"}
        assert layer.self_check_error is not None
        assert layer.output_error is not None
        assert 0.05 < layer.output_error < 0.2
    assert passes["flash_dmoe"].canary.startswith("passed")
