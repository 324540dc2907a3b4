"""The sampler on a GPU: compiled, and as it is written."""

from __future__ import annotations

import pytest
import torch

from moe_optimizer.engine import sampler

pytestmark = pytest.mark.gpu


def test_the_compiled_choice_is_the_written_one() -> None:
    compiled = torch.compile(sampler._largest, dynamic=True)
    generator = torch.Generator(device="cuda").manual_seed(0)
    # One row and many; whole blocks, a token more, and fewer than one.
    for rows, vocab_size in ((1, 151_936), (7, 151_936), (200, 2048), (200, 2049), (64, 509)):
        logits = 3 * torch.randn(rows, vocab_size, device="cuda", generator=generator).bfloat16()
        temperatures = torch.linspace(0, 1, rows, device="cuda")[:, None]
        noise = torch.empty(rows, 1024 - (-vocab_size // 1024), device="cuda").exponential_(generator=generator)
        want, got = (choose(logits, temperatures, noise) for choose in (sampler._largest, compiled))
        # Sums of exponentials in another order may exchange two that are as good as equal.
        assert (want == got).sum() >= rows - 1
        assert got[0] == logits[0].argmax()
