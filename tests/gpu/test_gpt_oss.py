"""A checkpoint as gpt-oss's on a GPU: experts in MXFP4 as stored, by our CUDA kernels, beside vLLM's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.launcher.launch import running
from moe_optimizer.plan.decision import Wish
from moe_optimizer.proof.record import Proof, read_proofs
from tests.gpt_oss_checkpoint import EXPERTS, HIDDEN, LAYERS, WIDTH, write_gpt_oss
from tests.gpu.plans import gpu_plan
from tests.vllm.conftest import READY_TIMEOUT_S, Answer, ask

pytestmark = pytest.mark.gpu

CAPTURE = ("--cudagraph-capture-sizes", "1", "2", "4", "8", "16")
BOUND = 0.2
"""Of nine tenths of the logits, whose standard deviation is 4: each side is within half of it of FP32 on the CPU."""


def served(model: Path, run_dir: Path, wish: Wish, *arguments: str) -> tuple[tuple[Answer, ...], tuple[Proof, ...]]:
    required = frozenset({"flash_dmoe"} if wish is Wish.ON else ())
    plan = gpu_plan(
        "--no-enable-prefix-caching", "--logprobs-mode", "raw_logits", *arguments, model=model,
        wishes={"flash_dmoe": (wish, "test")}, required=required, max_model_len=520, batch_size=16,
    )  # fmt: skip
    with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
        answers = ask(info.base_url)
    # Written a last time when the server ended: with what the requests ran.
    return answers, tuple(read_proofs(run_dir))


def logits_apart(ours: tuple[Answer, ...], stock: tuple[Answer, ...]) -> list[float]:
    """Return the differences of the best logits while the tokens before are the same."""
    apart = []
    for one, other in zip(ours, stock, strict=True):
        for mine, theirs, *tokens in zip(one.best_two, other.best_two, one.tokens, other.tokens, strict=True):
            apart += [abs(mine[token] - theirs[token]) for token in set(mine) & set(theirs)]
            if len(set(tokens)) > 1:
                break
    return sorted(apart)


@pytest.mark.parametrize("arguments", [CAPTURE, ("--enforce-eager",)], ids=["cuda-graphs", "eager"])
def test_our_kernels_read_the_checkpoint_as_it_is_and_agree_with_vllms(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    model = write_gpt_oss(tmp_path / "model")
    stock, _ = served(model, tmp_path / "stock", Wish.OFF, *arguments)
    answers, proofs = served(model, tmp_path / "ours", Wish.ON, *arguments)
    apart = logits_apart(answers, stock)
    assert len(apart) >= 40, "hardly any token in common"
    assert apart[9 * len(apart) // 10] < BOUND, apart
    entry = next(each.passes["flash_dmoe"] for each in proofs if each.passes["flash_dmoe"].layers)
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert entry.canary.startswith("passed")
    assert len(entry.layers) == LAYERS
    for layer in entry.layers:
        assert (layer.weight_format, layer.weight_dtype) == ("gpt_oss", "uint8")
        assert layer.weight_bytes == EXPERTS * 3 * HIDDEN * WIDTH * 4.25 / 8
        assert set(layer.calls_by_kernel) == {"direct", "grouped-mxfp4_weights"}
        assert layer.self_check_error is not None
