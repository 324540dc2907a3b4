"""The bundled model in FP8 by our CUDA kernels: perplexity within the bound, and no other kernel's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving.fp8_quality import SIDES, TINY_MOE, plan_of, served

pytestmark = pytest.mark.gpu

MAX_PERPLEXITY_RATIO = {"FP8 experts, ours, BF16 tokens": 1.01, "FP8 experts, ours, FP8 tokens": 1.02}
"""Against FP32; the second rounds the tokens too, with one scale for each of them."""


@pytest.mark.parametrize("name", MAX_PERPLEXITY_RATIO)
def test_perplexity_stays_within_the_bound_and_every_token_went_through_our_kernel(name: str, tmp_path: Path) -> None:
    fp32 = json.loads((TINY_MOE / "metrics.json").read_text())["heldout"]["perplexity_per_token"]
    result = served(TINY_MOE, plan_of(TINY_MOE, SIDES[name]), tmp_path)
    assert set(result["calls_by_kernel"]) == {SIDES[name].kernel}
    assert fp32 != pytest.approx(result["perplexity"], rel=1e-5)
    assert result["perplexity"] < fp32 * MAX_PERPLEXITY_RATIO[name]
