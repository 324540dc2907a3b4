"""The embedded engine in float32 as reference: what it says at a server's positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe_optimizer.measure.quality.distributions import Distributions, distributions
from moe_optimizer.measure.quality.divergence import compare, compare_generated
from moe_optimizer.measure.quality.embedded import EmbeddedProbe, EmbeddedRequest, compute
from tests.needed import skip_without

skip_without("torch", "transformers")

TINY_MOE = Path(__file__).resolve().parents[4] / "examples" / "tiny-moe"
PROMPT = (100, 200, 300, 400, 500, 600)
CHOSEN = (7, 8, 9)


def test_it_stands_beside_the_servers_own_tokens(tmp_path: Path) -> None:
    unlike = {11: -0.1, 12: -3.0}
    given = distributions([({**unlike, token: -9.0}, token, 0) for token in PROMPT[1:]])
    generated = distributions([({**unlike, token: -0.5}, token, 0) for token in CHOSEN])
    probes = []
    for name, answers in (("given", given), ("generated", generated)):
        answers.write(tmp_path / f"{name}.npz")
        probes.append(
            EmbeddedProbe(
                title=name, prompts=(PROMPT,), generated=3 * (name == "generated"),
                answers=str(tmp_path / f"{name}.npz"), reference=str(tmp_path / f"{name}-reference.npz"),
            )
        )  # fmt: skip
    suspects = compute(
        EmbeddedRequest(model=str(TINY_MOE), probes=tuple(probes), top_logprobs=2048), lambda share, text: None
    )
    assert any("MoE" in each for each in suspects.layers)
    on_given = Distributions.read(tmp_path / "given-reference.npz")
    on_generated = Distributions.read(tmp_path / "generated-reference.npz")
    for found in (on_given, on_generated):
        # The whole vocabulary of the model: probabilities that add up to one.
        np.testing.assert_allclose(np.exp(found.logprobs).sum(axis=1), 1, rtol=1e-5)
    assert on_given.next_ids.tolist() == list(PROMPT[1:])
    assert (compare(on_given, given).kl > 0.1).all()
    # Each position follows the server's tokens: the first differs, and the text ends there.
    assert compare_generated(on_generated, generated).matches.tolist() == [0]
    assert len(on_generated) == len(CHOSEN)
