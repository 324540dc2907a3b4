"""How well a server predicts the bundled model's held-out text."""

from __future__ import annotations

import json
import sys

from moe_optimizer.launcher.launch import ServerInfo
from tests.vllm.conftest import ROOT, TINY_MOE

sys.path.insert(0, str(ROOT / "scripts"))
from perplexity import START, perplexity, windows_of

__all__ = ["START", "heldout_perplexity", "reference_perplexity", "windows_of"]


def heldout_perplexity(info: ServerInfo) -> float:
    """Ask a server of the bundled model; it must have room for 513 tokens."""
    return perplexity(info.base_url, info.model, (TINY_MOE / "heldout.txt").read_text(encoding="utf-8"))


def reference_perplexity() -> float:
    """Of the same weights, computed by transformers in FP32."""
    return json.loads((TINY_MOE / "metrics.json").read_text(encoding="utf-8"))["heldout"]["perplexity_per_token"]
