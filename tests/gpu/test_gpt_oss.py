"""A checkpoint as gpt-oss's on a GPU: experts in MXFP4 as stored, by our CUDA kernels, against transformers in FP32.

Not against vLLM's own kernels: with the sizes of this checkpoint, Triton's of vLLM 0.26 gave another model's logits.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.serving.random_gpt_oss import write_random_gpt_oss
from moe_optimizer.launcher.launch import running
from moe_optimizer.launcher.run_folder import LOG_FILE
from moe_optimizer.plan.decision import Wish
from moe_optimizer.proof.record import read_proofs
from tests.gpt_oss_checkpoint import EXPERTS, HIDDEN, LAYERS, WIDTH, write_gpt_oss
from tests.gpu.plans import gpu_plan
from tests.vllm.conftest import READY_TIMEOUT_S, ask
from tests.vllm.test_gpt_oss import BOUND, logits_off, prompts

pytestmark = pytest.mark.gpu

CAPTURE = ("--cudagraph-capture-sizes", "1", "2", "4", "8", "16")


@pytest.mark.parametrize("arguments", [CAPTURE, ("--enforce-eager",)], ids=["cuda-graphs", "eager"])
def test_our_kernels_read_the_checkpoint_as_it_is(arguments, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    plan = gpu_plan(
        "--no-enable-prefix-caching", "--logprobs-mode", "raw_logits", *arguments,
        model=write_gpt_oss(tmp_path / "model"), wishes={"flash_dmoe": (Wish.ON, "test")},
        required=frozenset({"flash_dmoe"}), max_model_len=520, batch_size=16,
    )  # fmt: skip
    run_dir = tmp_path / "run"
    with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
        answers = ask(info.base_url, prompts())
    dense = write_gpt_oss(tmp_path / "dense", dequantized=True)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager").eval()
    assert logits_off(answers, model) < BOUND
    # Written a last time when the server ended: with what the requests ran.
    proofs = read_proofs(run_dir)
    entry = next(each.passes["flash_dmoe"] for each in proofs if each.passes["flash_dmoe"].layers)
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert entry.canary.startswith("passed")
    assert len(entry.layers) == LAYERS
    for layer in entry.layers:
        assert (layer.weight_format, layer.weight_dtype) == ("gpt_oss", "uint8")
        assert layer.weight_bytes == EXPERTS * 3 * HIDDEN * WIDTH * 4.25 / 8
        assert set(layer.calls_by_kernel) == {"direct", "grouped-mxfp4_weights"}
        assert layer.self_check_error is not None


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "vLLM's"])
def test_graphs_of_the_published_layers_give_what_their_steps_give_without(ours, tmp_path, monkeypatch):
    """Where each of a graph's rows is a request's. Others choose experts too, and how many experts are chosen decides
    the order of our sums: such steps may differ by rounding, which is no finding.
    """
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    plan = gpu_plan(
        *CAPTURE, "--gpu-memory-utilization", "0.4",
        model=write_random_gpt_oss(tmp_path / "model", num_hidden_layers=12, num_local_experts=128),
        wishes={"flash_dmoe": (Wish.ON if ours else Wish.OFF, "test")},
        required=frozenset({"flash_dmoe"} if ours else ()), max_model_len=4096, batch_size=16,
    )  # fmt: skip
    run_dir = tmp_path / "run"
    with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
        for requests in (1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 12, 16, 16):
            ask(
                info.base_url,
                [list(range(requests + 100 * each, requests + 100 * each + 20)) for each in range(requests)],
            )
    off = [
        each for each in (run_dir / LOG_FILE).read_text(encoding="utf-8").splitlines() if "gives other hidden" in each
    ]
    assert not [each for each in off if "all requests'" in each]
    assert not [each for each in off if "vLLM's own kernels" in each]
    if ours:
        entries = [each.passes["flash_dmoe"] for each in read_proofs(run_dir)]
        said = next(each.canary for each in entries if each.layers)
        assert "of vLLM's graphs, beside the same steps without them" in said
