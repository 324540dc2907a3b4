"""A checkpoint as gpt-oss's on a real server, whose experts our kernel reads as stored: against transformers in FP32.

vLLM's own CPU kernel for it needs AMX; where there is none, stock vLLM does not start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.launcher.launch import running
from moe_optimizer.proof.record import read_proofs
from moe_optimizer.proof.verdict import model_holders
from tests.gpt_oss_checkpoint import EXPERTS, HIDDEN, LAYERS, VOCABULARY, WIDTH, write_gpt_oss
from tests.vllm.conftest import READY_TIMEOUT_S, Answer, Served, ask, plan_here

torch = pytest.importorskip("torch")

PROMPT_LENGTHS = (1, 7, 40, 150)
"""The last is longer than the window of every other layer."""
BOUND = 0.2
"""Of nine tenths of the logits, whose standard deviation is 4: 0.07 was seen, and 0.5 without one layer's biases. In
the rest BF16 may choose another fourth expert."""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("gpt_oss")
    model = write_gpt_oss(folder / "model")
    plan = plan_here("--enforce-eager", "--logprobs-mode", "raw_logits", model=model)
    with running(plan, run_dir=folder / "run", ready_timeout_s=READY_TIMEOUT_S) as info:
        answers = ask(info.base_url, prompts())
    return Served(answers, read_proofs(folder / "run"), folder / "run", info)


def logits_off(answers: tuple[Answer, ...], model: Any) -> float:
    """Return by how much nine tenths of the best two logits are off at most from `model`'s after the same tokens."""
    off = []
    for prompt, answer in zip(prompts(), answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + list(answer.tokens)])).logits[0, len(prompt) - 1 : -1]
        for row, best in zip(logits, answer.best_two, strict=True):
            off += [abs(value - row[token].item()) for token, value in best.items()]
    return torch.tensor(off).quantile(0.9).item()


def test_the_logits_are_those_of_the_dequantised_model_in_fp32(served: Served, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    dense = write_gpt_oss(tmp_path / "dense", dequantized=True)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager").eval()
    assert logits_off(served.answers, model) < BOUND
    # What the bound is worth: another model with one layer's biases left out, or with its activation not clamped.
    experts = model.model.layers[0].mlp.experts
    bias = experts.down_proj_bias.data.clone()
    experts.down_proj_bias.data.zero_()
    assert logits_off(served.answers, model) > 2 * BOUND
    experts.down_proj_bias.data.copy_(bias)
    experts.limit = float("inf")
    assert logits_off(served.answers, model) > 2 * BOUND


def test_every_layer_is_read_as_stored_and_runs(served: Served) -> None:
    (holder,) = model_holders(served.proofs)
    entry = holder.passes["flash_dmoe"]
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert entry.canary.startswith("passed")
    assert [layer.name for layer in entry.layers] == [f"model.layers.{index}.mlp.experts" for index in range(LAYERS)]
    for layer in entry.layers:
        assert (layer.weight_format, layer.weight_dtype, layer.why_plain) == ("gpt_oss", "uint8", "")
        assert layer.weight_bytes == layer.loaded_bytes == EXPERTS * 3 * HIDDEN * WIDTH * 4.25 / 8
        assert layer.calls > 0
        assert layer.self_check_error is not None
